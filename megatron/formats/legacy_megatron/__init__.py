"""Checkpoints that Megatron-LM wrote before it had its core library."""
