"""Which tokenizer, and its files."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer: which one, and its files."""

    tokenizer_type: str | None = option(None)
    """GPT2BPETokenizer, HFTokenizer or NullTokenizer."""
    vocab_file: str | None = option(None, aliases=("--vocab",))
    """Path of the vocabulary (vocab.json of GPT2BPETokenizer)."""
    merge_file: str | None = option(None)
    """Path of the merges of a byte-pair encoding (merges.txt)."""
    tokenizer_model: str | None = option(None)
    """Folder (HFTokenizer) or model file of the tokenizer."""
    vocab_size: int | None = option(None)
    """NullTokenizer: number of token ids; one more is the end of document."""
    vocab_extra_ids: int = option(0)
    """Extra ids appended to the vocabulary."""
