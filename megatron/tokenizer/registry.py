"""The tokenizer of each `--tokenizer-type`, of the core or of a feature."""

from __future__ import annotations

import dataclasses

from megatron.config import ConfigError, TokenizerConfig
from megatron.config.features import features
from megatron.config.flags import nearest
from megatron.tokenizer.base import TextSource, Tokenizer, TokenizerType

_FIRST = "GPT2BPETokenizer"
_OTHERS = (
    *("ByteLevelTokenizer", "ByteLevel", "NullTokenizer", "IdTokenizer"),
    "CharacterLevelTokenizer",
)
_BY_FEATURE = {name: feature for feature in features().values() for name in feature.tokenizers}
TOKENIZERS = (_FIRST, *_BY_FEATURE, *_OTHERS)
"""Names of all types, as messages list them."""


def type_of(name: str | None) -> TokenizerType | None:
    """A type by its name, whose module is imported; None if the name is unknown."""
    if name in _BY_FEATURE:
        kind: TokenizerType = _BY_FEATURE[name].tokenizer(name)
        return kind
    match name:
        case "GPT2BPETokenizer":
            from megatron.tokenizer.gpt2_bpe import TYPE

            return TYPE
        case "ByteLevelTokenizer" | "ByteLevel" | "CharacterLevelTokenizer":
            from megatron.tokenizer.plain import ByteLevelTokenizer

            return TokenizerType(ByteLevelTokenizer.from_config)
        case "NullTokenizer" | "IdTokenizer":
            from megatron.tokenizer.plain import IdTokenizer, NullTokenizer

            cls = NullTokenizer if name == "NullTokenizer" else IdTokenizer
            return TokenizerType(cls.from_config, sized=True)
    return None


def build_tokenizer(config: TokenizerConfig, texts: TextSource | None = None) -> Tokenizer:
    """The tokenizer that the configuration names. A SentencePiece model that does not exist is
    trained on `texts` by one process while the others wait. Raises ConfigError, FileNotFoundError;
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
    """The configuration with the files that are found in --cache-dir, without that folder, or at
    the path of --tokenizer-model-type. Raises ConfigError or FileNotFoundError if one does not
    exist."""
    if config.cache_dir is None and config.tokenizer_model_type is None:
        return config
    kind = type_of(config.tokenizer_type)
    completed = dataclasses.replace(config, cache_dir=None)
    if kind is None or kind.published is None:
        return completed
    by_features = (each.tokenizer_files(config, kind.published) for each in features().values())
    return next((each for each in by_features if each is not None), completed)


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
    kind = type_of(config.tokenizer_type)
    if wanted is None or (kind is not None and kind.sized):
        return size
    if wanted < size:
        raise ConfigError(
            f"--vocab-size {wanted} is smaller than the vocabulary of {size} ids "
            f"({tokenizer.source}): give {size} or more, or leave the flag out"
        )
    return wanted
