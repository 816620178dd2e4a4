"""Samples of BERT and T5, and what distinguishes their networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import KindConfig, ModelPart
from megatron.config.flags import ConfigError, needs_value, option

PAIR_TASKS = ("sentence-order", "next-sentence")
DECODER_STARTS = ("pad", "bos", "eos")


@dataclass(frozen=True, kw_only=True)
class FirstNormConfig(ModelPart):
    """Norm of the embeddings."""

    first_norm: bool = option(True, off="--no-first-norm", role="weights")
    """Do not apply a norm before the attention of the first block, as ModernBERT, whose embeddings
    are normalised already, and GPT-1."""

    families: ClassVar[frozenset[str]] = frozenset({"gpt", "bert", "t5", "retro"})

    @property
    def idle(self) -> bool:
        return self.first_norm


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelPart):
    """Positions of an encoder and a decoder."""

    relative_attention_per_block: bool = option(
        False, role="weights", needs=needs_value("position_embedding_type", "relative")
    )
    """T5: each block has biases of relative positions of its own, as UMT5, instead of one table for
    the encoder and one for the decoder."""
    separate_decoder_embedding: bool = option(False, role="weights")
    """T5: the decoder has position embeddings, and a norm of the embeddings, of its own, as BART,
    instead of those of the encoder; logits then have a bias with --lm-head-bias alone."""

    families: ClassVar[frozenset[str]] = frozenset({"t5"})

    @property
    def idle(self) -> bool:
        return not (self.relative_attention_per_block or self.separate_decoder_embedding)


@dataclass(frozen=True)
class MaskedDataConfig(KindConfig):
    """Masked data: samples of BERT and T5."""

    mask_prob: float = option(0.15)
    """Fraction of a sample's tokens that are masked and predicted."""
    short_seq_prob: float = option(0.1)
    """Fraction of samples with a shorter length, drawn uniformly from 2 tokens upwards."""
    max_preds_per_seq: int | None = option(
        None, derived="seq-length x mask-prob, rounded up to a multiple of 10"
    )
    """BERT: maximum number of predicted tokens per sample."""
    eval_max_preds_per_seq: int | None = option(None)
    """The same of evaluations; it must be that of training (2019)."""
    max_ngrams: int = option(3)
    """BERT: maximum number of consecutive words that are masked together; n words are masked with a
    probability proportional to 1/n. 1 masks single words."""
    favor_longer_ngram: bool = option(False)
    """BERT: reverse the probabilities of --max-ngrams, so that longer n-grams are more likely."""
    whole_word_masking: bool = option(True, off="--no-whole-word-masking")
    """BERT: mask single tokens instead of whole words."""
    bert_pair_task: str = option("sentence-order", choices=PAIR_TASKS)
    """BERT: task of the second head: whether the two segments of a document are swapped (as in
    Megatron and ALBERT), or whether the second one is from another document (as in
    BERT)."""
    bert_packing: bool = option(False)
    """BERT: pack several samples into a sequence instead of padding, which needs
    --bert-no-binary-head; attention does not cross samples, and position ids restart with each."""
    mean_noise_span_length: float = option(3.0)
    """T5: mean number of tokens per masked span."""
    max_noise_span_length: int = option(10)
    """T5: maximum number of tokens per masked span."""
    decoder_start_token: str = option("pad", choices=DECODER_STARTS)
    """T5: first token of the decoder's input: the padding token, as in T5, the beginning of text
    ([BOS]), as in Megatron-LM, to continue its checkpoints, or the end of text, as in BART."""
    use_tfrecords: bool = option(False)
    """BERT: the data paths are TFRecord files of google-research/bert's create_pretraining_data.py,
    which are already masked."""

    files: ClassVar[str | None] = "tfrecord"
    samples: ClassVar[str] = "masked"
    idle: ClassVar[str] = "a GPT's data are not masked"

    @property
    def reads_all(self) -> bool:
        return self.use_tfrecords

    def check_shares(self) -> None:
        """Refuses fractions that are out of range."""
        if not 0 < self.mask_prob < 1:
            raise ConfigError(
                f"--mask-prob {self.mask_prob}: give a fraction between 0 and 1, such as 0.15"
            )
        if not 0 <= self.short_seq_prob <= 1:
            raise ConfigError(
                f"--short-seq-prob {self.short_seq_prob}: give a fraction from 0 to 1, such as 0.1"
            )

    def max_predictions(self, seq_length: int) -> int:
        """BERT: maximum number of predicted tokens of a sample of `seq_length` tokens."""
        number = self.max_preds_per_seq
        if number is None:
            number = math.ceil(seq_length * self.mask_prob / 10) * 10
        if number < 1:
            raise ConfigError(f"--max-preds-per-seq {number}: give a positive number of tokens")
        if self.eval_max_preds_per_seq not in (None, number):
            raise ConfigError(
                f"--eval-max-preds-per-seq {self.eval_max_preds_per_seq} differs from "
                f"--max-preds-per-seq {number}, with which a run evaluates too; leave it out"
            )
        return number
