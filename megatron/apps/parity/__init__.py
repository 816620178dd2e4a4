"""Checks that training in a parallel layout equals training on one process."""
