"""Tokenizers and files, as for instructions."""

from ...features.instruction.conftest import gpt2, with_template, write

__all__ = ["gpt2", "with_template", "write"]
