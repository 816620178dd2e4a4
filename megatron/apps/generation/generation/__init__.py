"""Text from a model on a command line: what it continues, and where its texts go."""
