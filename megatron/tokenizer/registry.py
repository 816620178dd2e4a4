"""The tokenizer of each `--tokenizer-type`: a new family is a file and a line here."""

from __future__ import annotations

import pkgutil
from typing import Any

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.base import TextSource, Tokenizer
from megatron.util.nearest import nearest

TOKENIZERS = {
    "GPT2BPETokenizer": "gpt2_bpe:GPT2BPETokenizer",
    "BertWordPieceLowerCase": "wordpiece:WordPieceTokenizer",
    "BertWordPieceCase": "wordpiece:WordPieceTokenizer",
    "SentencePieceTokenizer": "sentence_piece:SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "sentence_piece:SentencePieceTokenizer",
    "Llama2Tokenizer": "sentence_piece:SentencePieceTokenizer",
    "TikTokenizer": "tik_token:TikTokenizer",
    "Llama3Tokenizer": "tik_token:TikTokenizer",
    "HFTokenizer": "huggingface:HFTokenizer",
    "HuggingFaceTokenizer": "huggingface:HFTokenizer",
    "ByteLevelTokenizer": "byte:ByteLevelTokenizer",
    "ByteLevel": "byte:ByteLevelTokenizer",
    "NullTokenizer": "null:NullTokenizer",
    # Names of 2019.
    "BertWordPieceTokenizer": "wordpiece:WordPieceTokenizer",
    "CharacterLevelTokenizer": "byte:ByteLevelTokenizer",
}
"""For each type a module of this package, imported when it is needed, and a class in it whose
`from_config` makes the tokenizer."""
_TRAINED_WHEN_MISSING = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")


def build_tokenizer(config: TokenizerConfig, texts: TextSource | None = None) -> Tokenizer:
    """The tokenizer that the configuration names. A SentencePiece model that does not exist is
    trained on `texts` by one process while the others wait. Raises ConfigError, FileNotFoundError;
    ValueError if a file is not of the kind that its flag requires."""
    known = ", ".join(TOKENIZERS)
    if config.tokenizer_type is None:
        raise ConfigError(f"--tokenizer-type is missing; expected one of {known}")
    if config.tokenizer_type not in TOKENIZERS:
        hint = nearest(config.tokenizer_type, TOKENIZERS, " Did you mean {}?")
        raise ConfigError(
            f"--tokenizer-type {config.tokenizer_type} is unknown; expected one of {known}.{hint}"
        )
    if texts is not None and config.tokenizer_type in _TRAINED_WHEN_MISSING:
        _resolved("train:train_missing_model")(config, texts)
    return _resolved(TOKENIZERS[config.tokenizer_type]).from_config(config)


def _resolved(name: str) -> Any:
    return pkgutil.resolve_name(f"megatron.tokenizer.{name}")
