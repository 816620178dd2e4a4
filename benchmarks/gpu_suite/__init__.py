"""What `benchmarks/gpu.py` (`make bench-gpu`) measures on one GPU."""
