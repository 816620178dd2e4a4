"""Checkpoints of Meta's programs for Llama, and of Mistral's: ``params.json`` beside
``consolidated.*.pth``."""
