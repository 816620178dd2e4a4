"""Compression in training: quantised weights and activations, pruning, fewer layers."""
