"""Whether a parallel layout trains as one process does."""
