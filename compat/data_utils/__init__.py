"""The package of data sets of Megatron-LM's first release (2019)."""
