"""z-loss: a penalty of the logits' scale."""
