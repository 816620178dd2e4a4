"""Folders of other trainers, whose tensors are those of Hugging Face's tables under other names."""
