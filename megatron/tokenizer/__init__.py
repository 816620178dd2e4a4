"""Text to token ids and back: one protocol, one file per family of tokenizers."""

from megatron.tokenizer.protocol import Tokenizer
from megatron.tokenizer.registry import build_tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]
