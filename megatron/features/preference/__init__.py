"""Training on preferences: DPO and its kin, KTO, reward models."""
