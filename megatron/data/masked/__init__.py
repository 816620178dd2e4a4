"""Samples of models that predict hidden tokens: BERT's masked words, T5's corrupted spans."""
