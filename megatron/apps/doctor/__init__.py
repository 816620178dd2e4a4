"""Examination of a run's nodes: their hardware, software and the network between them."""
