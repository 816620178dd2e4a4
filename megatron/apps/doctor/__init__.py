"""Examination of a run's nodes: their hardware and software, and the network between them."""
