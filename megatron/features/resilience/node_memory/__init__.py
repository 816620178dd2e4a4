"""Checkpoints in the host memory of the nodes."""
