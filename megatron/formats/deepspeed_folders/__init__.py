"""The folders that DeepSpeed's engines save, and its universal checkpoints."""
