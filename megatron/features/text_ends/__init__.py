"""Settings of generation in checkpoints."""
