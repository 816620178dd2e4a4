"""Training data given as names of corpora."""
