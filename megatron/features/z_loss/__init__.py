"""z-loss: a penalty on the scale of the logits."""
