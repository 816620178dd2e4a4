"""Evaluation of a checkpoint's model without training."""
