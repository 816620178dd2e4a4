"""Training on text files that are tokenized on the fly."""
