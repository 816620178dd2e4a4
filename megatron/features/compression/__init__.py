"""Compression during training: quantised weights and activations, pruning, and layer reduction."""
