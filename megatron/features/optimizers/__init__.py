"""Optimizers in addition to the core's AdamW and SGD."""
