"""Mixture-of-experts architectures of `transformers`."""
