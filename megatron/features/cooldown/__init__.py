"""The end of a training as a branch of it."""
