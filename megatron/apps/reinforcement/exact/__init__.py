"""Training probabilities that are bitwise equal to the generation probabilities."""
