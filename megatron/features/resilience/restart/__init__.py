"""Ranks that are started again, by a guardian each or with fewer nodes."""
