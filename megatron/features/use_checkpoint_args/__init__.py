"""Settings that a run takes over from a checkpoint."""
