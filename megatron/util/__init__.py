"""Helpers of all packages: files, locks, digests, hints, processes.

It imports nothing of this project, and neither torch nor NumPy.
"""
