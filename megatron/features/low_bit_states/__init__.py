"""Optimizer states stored in fewer than 32 bits."""
