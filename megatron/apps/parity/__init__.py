"""Checks that a parallel layout trains as one process does."""
