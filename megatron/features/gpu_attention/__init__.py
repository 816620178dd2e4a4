"""Attention kernels for GPUs."""
