"""Runs that start from the weights of a model with other parts."""
