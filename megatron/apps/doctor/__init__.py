"""Examining the nodes of a run: what each is, what each sees, and what lies between them."""
