"""Corpora by name."""
