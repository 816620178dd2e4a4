"""Flags for tiktoken vocabularies."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import FlagPart
from megatron.config.flags import needs_value, option

_TIKTOKEN = needs_value("tokenizer_type", "TikTokenizer", "Llama3Tokenizer")


@dataclass(frozen=True, kw_only=True)
class TikTokenFlags(FlagPart):
    """JSON vocabulary for tiktoken."""

    tiktoken_pattern: str | None = option(None, choices=("v1", "v2"), needs=_TIKTOKEN)
    """TikTokenizer: version of the regular expression that splits text, for a JSON vocabulary."""
    tiktoken_num_special_tokens: int = option(1000, needs=_TIKTOKEN)
    """TikTokenizer: number of ids reserved for special tokens before those of a JSON vocabulary."""
    tiktoken_special_tokens: tuple[str, ...] = option(("<unk>", "<s>", "</s>"), needs=_TIKTOKEN)
    """TikTokenizer: first special tokens of a JSON vocabulary. The others are named <SPECIAL_N>."""
