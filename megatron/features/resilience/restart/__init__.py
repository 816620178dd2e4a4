"""Restart of failed ranks, by a guardian process per rank or with a smaller number of nodes."""
