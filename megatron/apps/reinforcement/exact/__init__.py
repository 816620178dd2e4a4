"""Training probabilities that are bitwise equal to the probabilities of generation."""
