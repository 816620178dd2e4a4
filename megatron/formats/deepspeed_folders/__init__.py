"""Checkpoint folders that DeepSpeed engines save, and DeepSpeed's universal checkpoints."""
