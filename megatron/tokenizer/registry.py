"""Which `--tokenizer-type` is built by what: a new family is a file and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.byte import ByteLevelTokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tokenizer.huggingface import HFTokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.protocol import Tokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer, model_path
from megatron.tokenizer.tik_token import TikTokenizer
from megatron.tokenizer.train_sentence_piece import TextSource, train_missing_model
from megatron.tokenizer.wordpiece import WordPieceTokenizer

TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "GPT2BPETokenizer": GPT2BPETokenizer.from_config,
    "BertWordPieceLowerCase": WordPieceTokenizer.lower_from_config,
    "BertWordPieceCase": WordPieceTokenizer.cased_from_config,
    "SentencePieceTokenizer": SentencePieceTokenizer.from_config,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer.gpt_from_config,
    "Llama2Tokenizer": SentencePieceTokenizer.llama2_from_config,
    "TikTokenizer": TikTokenizer.from_config,
    "Llama3Tokenizer": TikTokenizer.from_config,
    "HFTokenizer": HFTokenizer.from_config,
    "HuggingFaceTokenizer": HFTokenizer.from_config,
    "ByteLevelTokenizer": ByteLevelTokenizer.from_config,
    "ByteLevel": ByteLevelTokenizer.from_config,
    "NullTokenizer": NullTokenizer.from_config,
    # Names of 2019.
    "BertWordPieceTokenizer": WordPieceTokenizer.named_from_config,
    "CharacterLevelTokenizer": ByteLevelTokenizer.character_level_from_config,
}
_TRAINED_WHEN_MISSING = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")


def build_tokenizer(config: TokenizerConfig, texts: TextSource | None = None) -> Tokenizer:
    """The tokenizer that the configuration names.

    Args:
        texts: of the run that needs it, for a SentencePiece model that does not exist: it is
            trained on them, by one process while the others wait.

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
    if texts is not None and config.tokenizer_type in _TRAINED_WHEN_MISSING:
        path = model_path(config, new=True)
        train_missing_model(path, config.tokenizer_model_type, config.vocab_size, texts)
    return TOKENIZERS[config.tokenizer_type](config)
