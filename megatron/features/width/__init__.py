"""Maximal update parametrisation (muP): scale learning rates and initial weights with the model's
width and depth."""
