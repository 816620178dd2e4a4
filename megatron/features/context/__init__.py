"""Long context: attention over sequences that ranks divide, and memory for long sequences."""
