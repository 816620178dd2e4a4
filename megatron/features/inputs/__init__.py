"""Inputs of a run, which checkpoints keep and a run that continues compares."""
