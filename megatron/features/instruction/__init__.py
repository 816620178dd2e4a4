"""Fine-tuning on instructions and conversations."""
