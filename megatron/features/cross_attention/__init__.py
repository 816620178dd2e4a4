"""Attention to an encoder's output."""
