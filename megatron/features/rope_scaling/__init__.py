"""Checkpoints continued with other RoPE scaling or longer sequences."""
