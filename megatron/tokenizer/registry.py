"""Lookup of the tokenizer for each `--tokenizer-type`, whether from the core or from a feature."""

from __future__ import annotations

import dataclasses

from megatron.config import ConfigError, TokenizerConfig
from megatron.config.features import features
from megatron.config.flags import nearest
from megatron.tokenizer.base import TextSource, Tokenizer, TokenizerType

_BY_FEATURE = {name: feature for feature in features().values() for name in feature.tokenizers}
TOKENIZERS = ("GPT2BPETokenizer", *_BY_FEATURE, "NullTokenizer", "IdTokenizer")
"""Names of all tokenizer types, in the order in which messages list them."""


def type_of(name: str | None) -> TokenizerType | None:
    """Import and return the tokenizer type of this name. Return None if the name is unknown."""
    if name in _BY_FEATURE:
        kind: TokenizerType = _BY_FEATURE[name].tokenizer(name)
        return kind
    match name:
        case "GPT2BPETokenizer":
            from megatron.tokenizer.gpt2_bpe import TYPE

            return TYPE
        case "NullTokenizer" | "IdTokenizer":
            from megatron.tokenizer.plain import IdTokenizer, NullTokenizer

            cls = NullTokenizer if name == "NullTokenizer" else IdTokenizer
            return TokenizerType(cls.from_config, sized=True)
    return None


def build_tokenizer(config: TokenizerConfig, texts: TextSource | None = None) -> Tokenizer:
    """Build a configuration's tokenizer. If `texts` is given, a missing SentencePiece model is
    trained on them by one process while the others wait. Raises ConfigError, FileNotFoundError, or
    ValueError if a file is not of the kind that its flag requires."""
    known = ", ".join(TOKENIZERS)
    config = with_files(config)
    if config.tokenizer_type is None:
        raise ConfigError(
            "--tokenizer-type is missing, and so are tokenizer files at --load; expected one of "
            f"{known}; or give --vocab-size for indexed data without a tokenizer"
        )
    kind = type_of(config.tokenizer_type)
    if kind is None:
        hint = nearest(config.tokenizer_type, TOKENIZERS, " Did you mean {}?")
        raise ConfigError(
            f"--tokenizer-type {config.tokenizer_type} is unknown; expected one of {known}.{hint}"
        )
    if config.bpe_library != "tiktoken" and config.tokenizer_type != "GPT2BPETokenizer":
        raise ConfigError(
            f"--bpe-library {config.bpe_library} is for --tokenizer-type GPT2BPETokenizer, not "
            f"{config.tokenizer_type}; leave it out"
        )
    if texts is not None and kind.train is not None:
        kind.train(config, texts)
    return kind.make(config)


def with_files(config: TokenizerConfig) -> TokenizerConfig:
    """Return the configuration with the vocabulary files that --cache-dir or --tokenizer-model-type
    selects, and with --cache-dir removed. Raises ConfigError or FileNotFoundError if a file does
    not exist."""
    if config.cache_dir is None and config.tokenizer_model_type is None:
        return config
    by_features = (each.tokenizer_files(config) for each in features().values())
    completed = (each for each in by_features if each is not None)
    return next(completed, dataclasses.replace(config, cache_dir=None))


def implied_type(config: TokenizerConfig, of_files: str) -> tuple[str, str] | None:
    """Return the tokenizer type that other flags imply, and the reason. It is `of_files` if
    vocabulary files are given, and IdTokenizer if only --vocab-size is. Return None without such
    flags. Raises ConfigError if --tokenizer-model is given, because its type cannot be inferred."""
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
    """Return the number of rows of the token embedding before padding: the tokenizer's size, or a
    larger --vocab-size if the tokenizer's files determine its size. Raises ConfigError if
    --vocab-size is smaller than the tokenizer."""
    wanted, size = config.vocab_size, tokenizer.vocab_size
    kind = type_of(config.tokenizer_type)
    if wanted is None or (kind is not None and kind.sized):
        return size
    if wanted < size:
        raise ConfigError(
            f"--vocab-size {wanted} is smaller than the vocabulary of {size} ids "
            f"({tokenizer.source}): give {size} or more, or leave the flag out"
        )
    return wanted
