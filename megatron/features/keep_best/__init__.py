"""Checkpoints of the best evaluation, and early stopping."""
