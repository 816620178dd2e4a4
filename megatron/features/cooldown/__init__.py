"""The cooldown of a training run as a branch of it."""
