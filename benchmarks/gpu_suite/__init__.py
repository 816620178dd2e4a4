"""Suite of `benchmarks/gpu.py` (`make bench-gpu`): the measurements on one GPU, and their order."""
