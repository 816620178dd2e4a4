"""Comparison of flags, code, data and checkpoints between the processes of a run."""
