"""BERT and T5: masked samples, layers, families."""
