"""Cooldown of a training run as a branch of that run."""
