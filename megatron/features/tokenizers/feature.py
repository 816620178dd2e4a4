"""Tokenizers of WordPiece, SentencePiece, tiktoken and Hugging Face, and a faster encoder of
GPT-2's BPE."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature

_VOCABULARY = (("vocab_file", ("{}-vocab.txt", "vocab.txt")),)


class TokenizersFeature(Feature):
    tokenizers = (
        *("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer"),
        *("GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "Llama3Tokenizer"),
        "BertWordPieceTokenizer",  # a name of 2019
        *("HFTokenizer", "HuggingFaceTokenizer"),
    )

    def tokenizer(self, name: str) -> Any:
        from megatron.tokenizer.base import PublishedFiles, TokenizerType

        if name.startswith("Bert"):
            from megatron.features.tokenizers.wordpiece import WordPieceTokenizer

            case = "cased" if name == "BertWordPieceCase" else "uncased"
            published = PublishedFiles(f"bert-large-{case}", _VOCABULARY, by_name=True)
            return TokenizerType(WordPieceTokenizer.from_config, published=published)
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

    def tokenizer_files(self, config: Any, published: Any) -> Any:
        from megatron.features.tokenizers.cached_files import with_cached_files

        return with_cached_files(config, published)

    def batch_encoder(self) -> Any:
        from megatron.features.tokenizers.fastokens_bpe import BatchEncoder, require_fastokens

        require_fastokens()
        return BatchEncoder


FEATURE = TokenizersFeature()
