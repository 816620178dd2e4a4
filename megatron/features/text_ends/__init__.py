"""Generation settings and end-of-text tokens in checkpoints."""
