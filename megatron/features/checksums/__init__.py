"""Verification of data files against the checksums stored next to them."""
