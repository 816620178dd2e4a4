"""Checkpoints of other programs: a package for each format, and conversion between them."""
