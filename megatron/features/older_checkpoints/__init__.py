"""Older checkpoints: which of them are kept, and which one a run falls back to."""
