"""Which tokenizer, and its files."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer: which one, and its files."""

    tokenizer_type: str | None = option(None)
    """GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase, SentencePieceTokenizer,
    GPTSentencePieceTokenizer, Llama2Tokenizer, TikTokenizer, HFTokenizer, ByteLevelTokenizer,
    NullTokenizer, or a name of 2019 (docs/guides/tokenizers.md)."""
    vocab_file: str | None = option(None, aliases=("--vocab",))
    """Path of the vocabulary (vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPiece...)."""
    merge_file: str | None = option(None)
    """Path of the merges of a byte-pair encoding (merges.txt)."""
    tokenizer_model: str | None = option(None, aliases=("--tokenizer-path",))
    """Folder (HFTokenizer) or model file of the tokenizer (SentencePiece..., Llama2Tokenizer,
    TikTokenizer). A SentencePiece model that does not exist is trained, where the run reads text,
    with --vocab-size and --tokenizer-model-type."""
    tokenizer_model_type: str | None = option(None)
    """SentencePieceTokenizer: unigram, bpe, char or word, when a model is trained (default: bpe).
    BertWordPieceTokenizer: BERT's name, which says whether case counts (bert-large-cased)."""
    vocab_size: int | None = option(None)
    """NullTokenizer: number of token ids; one more is the end of document. SentencePiece: size of
    the model that is trained. TikTokenizer: tokens taken of a JSON vocabulary, specials included.
    """
    vocab_extra_ids: int = option(0)
    """Extra ids <extra_id_0>, <extra_id_1>, ... appended to the vocabulary, for T5's spans."""
    tiktoken_pattern: str | None = option(None, choices=("v1", "v2"))
    """TikTokenizer: how a JSON vocabulary's text is split before it is encoded."""
    tiktoken_num_special_tokens: int = option(1000)
    """TikTokenizer: ids from 0 that special tokens take before those of a JSON vocabulary."""
    tiktoken_special_tokens: tuple[str, ...] = option(("<unk>", "<s>", "</s>"))
    """TikTokenizer: the first special tokens of a JSON vocabulary; the rest are <SPECIAL_N>."""
