"""Checkpoints of Megatron-LM before its core library."""
