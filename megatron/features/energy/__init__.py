"""Energy, time of devices, money and CO2 that a run spends."""
