"""Gradient noise scale, an estimate of the batch size up to which more samples save steps."""
