"""Long context: context parallelism, which divides sequences among ranks, and memory savings."""
