"""Retro: from a corpus to a database, an index and the neighbours of every sample."""
