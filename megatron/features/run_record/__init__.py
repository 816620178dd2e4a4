"""Record of each start of a run, which makes the run repeatable."""
