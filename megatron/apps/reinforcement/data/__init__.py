"""Prompts, and the order in which a run has them."""
