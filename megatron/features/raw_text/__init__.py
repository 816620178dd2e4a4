"""Training on text files that are tokenized during training."""
