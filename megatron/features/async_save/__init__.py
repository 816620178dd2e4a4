"""Asynchronous checkpointing: training continues while a checkpoint is written."""
