"""Hangs: ranks that do not advance, and who holds them up."""
