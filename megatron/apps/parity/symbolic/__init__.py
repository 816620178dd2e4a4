"""Check of a layout on simulated ranks, at any size, on one machine."""
