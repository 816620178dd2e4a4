"""Programs for experiments that a run reports to."""
