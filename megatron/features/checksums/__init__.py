"""Data files compared with checksums next to them."""
