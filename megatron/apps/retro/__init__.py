"""Retrieval (Retro): preprocess a corpus, find the neighbours of training samples, and evaluate and
generate with them."""
