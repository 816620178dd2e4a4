"""Operators that cast to 8 bits, with a Triton kernel for GPUs and the same formula in torch."""
