"""Layers whose state has the same size after any number of tokens."""
