"""Evaluation of the model of a checkpoint, without a training."""
