"""Conversion between text and token ids: a base class, and a file per family of tokenizers."""

from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.registry import build_tokenizer, implied_type, vocabulary_rows

__all__ = ["Tokenizer", "build_tokenizer", "implied_type", "vocabulary_rows"]
