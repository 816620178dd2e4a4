"""Settings that a run takes from a checkpoint instead of flags."""
