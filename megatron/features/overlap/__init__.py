"""Overlap of computation with gathers of weights and with tensor-parallel collectives."""
