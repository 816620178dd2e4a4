"""Check of a layout of any size on one machine, with simulated ranks."""
