"""Folders of other trainers, whose tensors are in Hugging Face's tables under other names."""
