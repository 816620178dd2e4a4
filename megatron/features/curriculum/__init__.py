"""Curriculum learning: samples ordered by difficulty, and growing sequence lengths."""
