"""Operators that cast to 8 bits: Triton kernels for GPUs, and the same formulas in torch."""
