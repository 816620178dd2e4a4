"""Checkpoints before the newest: which are kept, and which a run falls back to."""
