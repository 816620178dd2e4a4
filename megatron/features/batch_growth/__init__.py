"""Batches that grow."""
