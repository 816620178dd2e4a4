"""Training on preferences: DPO and related losses, KTO, reward models."""
