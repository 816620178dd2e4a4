"""Collectives that run behind computation: gathers of weights, and those of tensor parallelism."""
