"""Documents read from text files and tokenized when they are needed."""
