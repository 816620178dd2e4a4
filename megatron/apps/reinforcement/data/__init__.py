"""Prompt data, and the order in which a run uses the prompts."""
