"""Probabilities of training with the bits of those of generation."""
