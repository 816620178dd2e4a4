"""The tokenizer of each `--tokenizer-type`: a new family is a file and a line here."""

from __future__ import annotations

import pkgutil
from typing import Any

from megatron.config import ConfigError, TokenizerConfig
from megatron.config.flags import nearest
from megatron.tokenizer.base import TextSource, Tokenizer

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
    "IdTokenizer": "null:IdTokenizer",
    # Names of 2019.
    "BertWordPieceTokenizer": "wordpiece:WordPieceTokenizer",
    "CharacterLevelTokenizer": "byte:ByteLevelTokenizer",
}
"""For each type a module of this package, imported when it is needed, and a class in it whose
`from_config` makes the tokenizer."""
_TRAINED_WHEN_MISSING = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
_SIZED = (
    *("NullTokenizer", "IdTokenizer", "TikTokenizer", "Llama3Tokenizer"), *_TRAINED_WHEN_MISSING
)  # fmt: skip
"""Types for which --vocab-size is a size of the tokenizer itself."""


def build_tokenizer(config: TokenizerConfig, texts: TextSource | None = None) -> Tokenizer:
    """The tokenizer that the configuration names. A SentencePiece model that does not exist is
    trained on `texts` by one process while the others wait. Raises ConfigError, FileNotFoundError;
    ValueError if a file is not of the kind that its flag requires."""
    known = ", ".join(TOKENIZERS)
    config = with_files(config)
    if config.tokenizer_type is None:
        raise ConfigError(
            f"--tokenizer-type is missing; expected one of {known}; or give --vocab-size for "
            "indexed data without a tokenizer"
        )
    if config.tokenizer_type not in TOKENIZERS:
        hint = nearest(config.tokenizer_type, TOKENIZERS, " Did you mean {}?")
        raise ConfigError(
            f"--tokenizer-type {config.tokenizer_type} is unknown; expected one of {known}.{hint}"
        )
    if config.bpe_library != "tiktoken" and config.tokenizer_type != "GPT2BPETokenizer":
        raise ConfigError(
            f"--bpe-library {config.bpe_library} is for --tokenizer-type GPT2BPETokenizer, not "
            f"{config.tokenizer_type}; leave it out"
        )
    if texts is not None and config.tokenizer_type in _TRAINED_WHEN_MISSING:
        _resolved("train:train_missing_model")(config, texts)
    return _resolved(TOKENIZERS[config.tokenizer_type]).from_config(config)


def with_files(config: TokenizerConfig) -> TokenizerConfig:
    """The configuration with the files that are found in --cache-dir, without that folder, or at
    the path of --tokenizer-model-type. Raises ConfigError or FileNotFoundError if one does not
    exist."""
    if config.cache_dir is None and config.tokenizer_model_type is None:
        return config
    return _resolved("cached_files:with_cached_files")(config)


def implied_type(config: TokenizerConfig, of_files: str) -> tuple[str, str] | None:
    """The type of a tokenizer that is given without one, and why: `of_files` with vocabulary files,
    or no tokenizer but a number of ids; None where nothing is given. Raises ConfigError if
    --tokenizer-model is given, whose type cannot be known."""
    if config.tokenizer_model:
        raise ConfigError(
            f"--tokenizer-model {config.tokenizer_model} needs --tokenizer-type: HFTokenizer for a "
            "folder, SentencePieceTokenizer, Llama2Tokenizer or TikTokenizer for a file"
        )
    for flag in ("vocab_file", "merge_file", "cache_dir"):
        if getattr(config, flag):
            return of_files, f"--{flag.replace('_', '-')} without --tokenizer-type"
    if config.vocab_size is not None:
        return "IdTokenizer", "--vocab-size without a tokenizer"
    return None


def vocabulary_rows(config: TokenizerConfig, tokenizer: Tokenizer) -> int:
    """Rows of the token embedding without padding: one for each id of the tokenizer, or
    --vocab-size, if that is given with a tokenizer whose files have a size of their own. Raises
    ConfigError if the ids do not fit."""
    wanted, size = config.vocab_size, tokenizer.vocab_size
    if wanted is None or config.tokenizer_type in _SIZED:
        return size
    if wanted < size:
        raise ConfigError(
            f"--vocab-size {wanted} is smaller than the vocabulary of {size} ids "
            f"({tokenizer.source}): give {size} or more, or leave the flag out"
        )
    return wanted


def _resolved(name: str) -> Any:
    return pkgutil.resolve_name(f"megatron.tokenizer.{name}")
