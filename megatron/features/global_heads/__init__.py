"""Separate sizes for the attention heads in blocks without a sliding window, as in Gemma 4."""
