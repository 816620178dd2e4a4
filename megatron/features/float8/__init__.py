"""GEMMs of linear layers in 8-bit floating point (FP8)."""
