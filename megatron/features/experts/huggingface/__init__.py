"""Architectures of `transformers` with experts."""
