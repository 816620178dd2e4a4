"""Energy, device time, cost and CO2 emissions of a run."""
