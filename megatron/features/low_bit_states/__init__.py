"""Optimizer states in fewer bits."""
