"""Which `--tokenizer-type` is built by what: a new family is a file and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tokenizer.huggingface import HFTokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.protocol import Tokenizer

TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "GPT2BPETokenizer": GPT2BPETokenizer.from_config,
    "HFTokenizer": HFTokenizer.from_config,
    "HuggingFaceTokenizer": HFTokenizer.from_config,
    "NullTokenizer": NullTokenizer.from_config,
}


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the configuration names.

    Raises:
        ConfigError: no or an unknown --tokenizer-type, or a flag it needs is missing.
        FileNotFoundError: a file is missing.
        ValueError: a file is not what its flag asks for.
    """
    known = ", ".join(TOKENIZERS)
    if config.tokenizer_type is None:
        raise ConfigError(f"--tokenizer-type is missing; it is one of {known}")
    if config.tokenizer_type not in TOKENIZERS:
        near = difflib.get_close_matches(config.tokenizer_type, TOKENIZERS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--tokenizer-type {config.tokenizer_type} is unknown; it is one of {known}.{hint}"
        )
    return TOKENIZERS[config.tokenizer_type](config)
