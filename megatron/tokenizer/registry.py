"""The tokenizer of each `--tokenizer-type`: a new family is a file and a line here."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.base import TextSource, Tokenizer
from megatron.util.nearest import nearest

TOKENIZERS = {
    "GPT2BPETokenizer": "gpt2_bpe:GPT2BPETokenizer.from_config",
    "BertWordPieceLowerCase": "wordpiece:WordPieceTokenizer.lower_from_config",
    "BertWordPieceCase": "wordpiece:WordPieceTokenizer.cased_from_config",
    "SentencePieceTokenizer": "sentence_piece:SentencePieceTokenizer.from_config",
    "GPTSentencePieceTokenizer": "sentence_piece:SentencePieceTokenizer.gpt_from_config",
    "Llama2Tokenizer": "sentence_piece:SentencePieceTokenizer.llama2_from_config",
    "TikTokenizer": "tik_token:TikTokenizer.from_config",
    "Llama3Tokenizer": "tik_token:TikTokenizer.from_config",
    "HFTokenizer": "huggingface:HFTokenizer.from_config",
    "HuggingFaceTokenizer": "huggingface:HFTokenizer.from_config",
    "ByteLevelTokenizer": "byte:ByteLevelTokenizer.from_config",
    "ByteLevel": "byte:ByteLevelTokenizer.from_config",
    "NullTokenizer": "null:NullTokenizer.from_config",
    # Names of 2019.
    "BertWordPieceTokenizer": "wordpiece:WordPieceTokenizer.named_from_config",
    "CharacterLevelTokenizer": "byte:ByteLevelTokenizer.character_level_from_config",
}
"""For each type a module of this package, imported when it is needed, and a callable in it that
makes the tokenizer from a TokenizerConfig."""
_TRAINED_WHEN_MISSING = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")


def build_tokenizer(config: TokenizerConfig, texts: TextSource | None = None) -> Tokenizer:
    """The tokenizer that the configuration names.

    Args:
        texts: of the run that needs it, for a SentencePiece model that does not exist: it is
            trained on them, by one process while the others wait.

    Raises:
        ConfigError: no or an unknown --tokenizer-type, or a flag it needs is missing.
        FileNotFoundError: a file is missing.
        ValueError: a file is not of the kind that its flag requires.
    """
    known = ", ".join(TOKENIZERS)
    if config.tokenizer_type is None:
        raise ConfigError(f"--tokenizer-type is missing; it is one of {known}")
    if config.tokenizer_type not in TOKENIZERS:
        hint = nearest(config.tokenizer_type, TOKENIZERS, " Did you mean {}?")
        raise ConfigError(
            f"--tokenizer-type {config.tokenizer_type} is unknown; it is one of {known}.{hint}"
        )
    if texts is not None and config.tokenizer_type in _TRAINED_WHEN_MISSING:
        _resolved("train:train_missing_model")(config, texts)
    return _resolved(TOKENIZERS[config.tokenizer_type])(config)


def _resolved(name: str) -> Callable[..., Any]:
    return pkgutil.resolve_name(f"megatron.tokenizer.{name}")
