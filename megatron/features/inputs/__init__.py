"""Inputs of a run: checkpoints record them, and a resumed run compares them."""
