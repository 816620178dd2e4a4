"""Low-rank adapters: LoRA, DoRA, QLoRA."""
