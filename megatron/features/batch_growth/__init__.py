"""Batch sizes that grow at the beginning of a run."""
