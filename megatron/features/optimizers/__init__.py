"""Optimizers next to the core's AdamW and SGD."""
