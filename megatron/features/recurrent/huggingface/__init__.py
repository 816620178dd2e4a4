"""Hugging Face architectures with recurrent layers."""
