"""Sharded checkpoints: torch.distributed.checkpoint (DCP), and Megatron-Core's torch_dist, which is
based on it."""
