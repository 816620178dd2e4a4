"""Hugging Face architectures with such layers."""
