"""What `benchmarks/gpu.py` (`make bench-gpu`) measures on one GPU, and how it spends the time."""
