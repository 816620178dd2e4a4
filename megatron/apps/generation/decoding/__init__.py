"""Decoding: convert logits to tokens and text."""
