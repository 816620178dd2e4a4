"""Feature that adds WordPiece, SentencePiece, tiktoken, Hugging Face and byte-level tokenizers, and
a faster encoder for GPT-2's BPE."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.tokenizers.flags import TikTokenFlags


class TokenizersFeature(Feature):
    flag_parts = {"tokenizer": TikTokenFlags}
    tokenizers = (
        *("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer"),
        *("GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "Llama3Tokenizer"),
        "BertWordPieceTokenizer",  # its name in 2019
        *("HFTokenizer", "HuggingFaceTokenizer"),
        *("ByteLevelTokenizer", "ByteLevel", "CharacterLevelTokenizer"),
    )

    def tokenizer(self, name: str) -> Any:
        from megatron.tokenizer.base import TokenizerType

        if name.startswith("Bert"):
            from megatron.features.tokenizers.wordpiece import WordPieceTokenizer

            return TokenizerType(WordPieceTokenizer.from_config)
        if name.startswith(("Byte", "Character")):
            from megatron.features.tokenizers.byte_level import ByteLevelTokenizer

            return TokenizerType(ByteLevelTokenizer.from_config)
        if name.startswith("H"):
            from megatron.features.tokenizers.huggingface import HFTokenizer

            return TokenizerType(HFTokenizer.from_config)
        if name.startswith(("Tik", "Llama3")):
            from megatron.features.tokenizers.tik_token import TikTokenizer

            return TokenizerType(TikTokenizer.from_config, sized=True)
        from megatron.features.tokenizers.sentence_piece import SentencePieceTokenizer
        from megatron.features.tokenizers.train import train_missing_model

        make = SentencePieceTokenizer.from_config
        if name == "Llama2Tokenizer":
            return TokenizerType(make)
        return TokenizerType(make, sized=True, train=train_missing_model)

    def tokenizer_files(self, config: Any) -> Any:
        from megatron.features.tokenizers.cached_files import with_cached_files

        return with_cached_files(config)

    def batch_encoder(self) -> Any:
        from megatron.features.tokenizers.fastokens_bpe import BatchEncoder, require_fastokens

        require_fastokens()
        return BatchEncoder


FEATURE = TokenizersFeature()
