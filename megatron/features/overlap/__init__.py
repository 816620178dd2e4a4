"""Collectives behind computation: gathers of weights, and collectives of tensor parallelism."""
