"""Which texts a step continues, in which pages, and what becomes of its results."""
