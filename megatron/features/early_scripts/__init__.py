"""Flags in scripts of 2019, of OneFlow and of Megatron-DeepSpeed."""
