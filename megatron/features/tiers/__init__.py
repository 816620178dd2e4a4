"""Tiers of memory for what ZeRO partitions: the device, main memory and files."""
