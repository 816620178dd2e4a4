"""Samples in the order of their difficulty, and growing sequence lengths."""
