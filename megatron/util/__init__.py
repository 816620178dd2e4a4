"""Helpers that every package uses: files, locks, digests, user-facing errors and processes.

This package imports no other package of the project, and neither torch nor NumPy.
"""
