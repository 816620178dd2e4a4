"""Checks of runs that continue a checkpoint with other RoPE scaling or longer sequences."""
