"""Curricula: sequences that grow longer, and samples drawn by their difficulty."""
