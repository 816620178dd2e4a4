"""Keeping the checkpoint with the best evaluation, and early stopping."""
