"""Multi-token prediction: blocks after the last layer that predict additional tokens."""
