"""Scheduling: choose the requests of each step, assign their pages, and process the results."""
