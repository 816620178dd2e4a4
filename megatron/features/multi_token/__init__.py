"""Multi-token prediction: further tokens, predicted by blocks after the last layer."""
