"""The texts that a step continues, their pages, and its results."""
