"""Heads of another size in blocks without a window, as in Gemma 4."""
