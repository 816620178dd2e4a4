"""What every package may need, once: files, locks, digests, hints, processes.

It imports nothing of this project, and neither torch nor NumPy.
"""
