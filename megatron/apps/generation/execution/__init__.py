"""Execution of steps: compute the model over the ranks of a layout."""
