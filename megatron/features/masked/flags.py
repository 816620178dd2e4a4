"""Flags of BERT's and T5's samples and networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron.config.features import FlagPart, KindConfig, ModelPart
from megatron.config.flags import ConfigError, ConfigResolver, needs_value, option

if TYPE_CHECKING:
    from megatron.config import ModelConfig

PAIR_TASKS = ("sentence-order", "next-sentence")
DECODER_STARTS = ("pad", "bos", "eos")


@dataclass(frozen=True, kw_only=True)
class FirstNormConfig(ModelPart):
    """Norm before the first attention layer."""

    first_norm: bool = option(True, off="--no-first-norm", role="weights")
    """Omit the norm before the attention of the first block, as in GPT-1, and in ModernBERT, whose
    embeddings are already normalised."""

    families: ClassVar[frozenset[str]] = frozenset({"gpt", "bert", "t5", "retro"})

    @property
    def idle(self) -> bool:
        return self.first_norm


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelPart):
    """Position and embedding options of an encoder-decoder model."""

    relative_attention_per_block: bool = option(
        False, role="weights", needs=needs_value("position_embedding_type", "relative")
    )
    """T5: give each block its own relative position biases, as in UMT5, instead of one table for
    the encoder and one for the decoder."""
    separate_decoder_embedding: bool = option(False, role="weights")
    """T5: give the decoder its own position embeddings and embedding norm, as in BART, instead of
    sharing the encoder's. The logits then have a bias only with --lm-head-bias."""

    families: ClassVar[frozenset[str]] = frozenset({"t5"})

    @property
    def idle(self) -> bool:
        return not (self.relative_attention_per_block or self.separate_decoder_embedding)


@dataclass(frozen=True, kw_only=True)
class SplitFlags(FlagPart):
    """Split of a pipeline between an encoder and a decoder."""

    before: ClassVar[str] = "recompute_activations"

    pipeline_model_parallel_split_rank: int | None = option(None, role="layout")
    """Pipeline rank at which the decoder of an encoder-decoder model (T5) starts. By default, all
    blocks are divided so that the costliest stage is as cheap as possible."""

    def partition(self, model: ModelConfig, chunks: int, resolver: ConfigResolver) -> str:
        """Return the number of blocks of each stage, with the decoder starting at the given
        pipeline rank. Raises ConfigError if it cannot start there."""
        name, split = "pipeline_model_parallel_split_rank", self.pipeline_model_parallel_split_rank
        if split is None:
            usual: str = super().partition(model, chunks, resolver)  # type: ignore[misc]
            return usual
        ranks, shown = resolver.values["pipeline_model_parallel_size"], resolver.show(name)
        decoder = model.decoder_num_layers
        if decoder is None:
            raise ConfigError(f"{shown}: this model has no decoder behind an encoder; leave it out")
        resolver.check(
            0 < split < ranks,
            f"{shown}: encoder and decoder need a process of the pipeline each, so with "
            f"{resolver.show('pipeline_model_parallel_size')} it must be "
            + (f"from 1 to {ranks - 1}" if ranks > 1 else "left out"),
        )
        resolver.check(
            chunks == 1,
            f"{shown} divides the processes of the pipeline, which have "
            f"{resolver.show('num_virtual_stages_per_pipeline_rank')}: give --pipeline-partition "
            "with the number of blocks of each stage, or leave both out",
        )
        resolver.check(
            not resolver.given("pipeline_partition"),
            f"{shown} contradicts {resolver.show('pipeline_partition')}; give one of them",
        )
        counts: list[int] = []
        for blocks, stages, layers in (
            (model.num_layers, split, "num_layers"), (decoder, ranks - split, "decoder_num_layers"),
        ):  # fmt: skip
            resolver.check(
                blocks >= stages,
                f"{shown} leaves {stages} processes to {resolver.show(layers)}: each needs a block",
            )
            # The first and the last stage get fewer blocks, as they have the embedding and the
            # head.
            each, over = divmod(blocks, stages)
            more = range(stages - over, stages) if layers == "num_layers" else range(over)
            counts += [each + (stage in more) for stage in range(stages)]
        partition = ",".join(map(str, counts))
        how = f"decoder from {resolver.flag(name)} {split} on"
        return resolver.put("pipeline_partition", partition, how)


@dataclass(frozen=True)
class MaskedDataConfig(KindConfig):
    """Masked data: samples of BERT and T5."""

    mask_prob: float = option(0.15)
    """Fraction of a sample's tokens that are masked and predicted."""
    short_seq_prob: float = option(0.1)
    """Fraction of samples with a shorter target length, drawn uniformly from 2 tokens upwards."""
    max_preds_per_seq: int | None = option(
        None, derived="seq-length x mask-prob, rounded up to a multiple of 10"
    )
    """BERT: maximum number of predicted tokens per sample."""
    eval_max_preds_per_seq: int | None = option(None)
    """Number of predicted tokens per sample in evaluations, accepted for compatibility with old
    scripts (2019). It must equal --max-preds-per-seq."""
    max_ngrams: int = option(3)
    """BERT: maximum number of consecutive words that are masked together. The probability of n
    words is proportional to 1/n; 1 masks single words."""
    favor_longer_ngram: bool = option(False)
    """BERT: reverse the probabilities of --max-ngrams, so that longer n-grams are more likely."""
    whole_word_masking: bool = option(True, off="--no-whole-word-masking")
    """BERT: mask single tokens instead of whole words."""
    bert_pair_task: str = option("sentence-order", choices=PAIR_TASKS)
    """BERT: task of the binary head. sentence-order predicts whether two consecutive segments are
    swapped (as in Megatron and ALBERT), and next-sentence whether the second segment is from
    another document (as in BERT)."""
    bert_packing: bool = option(False)
    """BERT: pack several samples into a sequence instead of padding. Attention does not cross
    samples, and position ids restart with each sample. It needs --bert-no-binary-head."""
    mean_noise_span_length: float = option(3.0)
    """T5: mean number of tokens per masked span."""
    max_noise_span_length: int = option(10)
    """T5: maximum number of tokens per masked span."""
    decoder_start_token: str = option("pad", choices=DECODER_STARTS)
    """T5: first token of the decoder's input. pad is the padding token, as in T5; bos the
    beginning-of-text token ([BOS]), as in Megatron-LM, whose checkpoints need it; eos the
    end-of-text token, as in BART."""
    use_tfrecords: bool = option(False)
    """BERT: read the data paths as TFRecord files written by google-research/bert's
    create_pretraining_data.py, whose samples are already masked."""

    files: ClassVar[str | None] = "tfrecord"
    samples: ClassVar[str] = "masked"
    idle: ClassVar[str] = "a GPT's data are not masked"

    @property
    def reads_all(self) -> bool:
        return self.use_tfrecords

    def check_shares(self) -> None:
        """Raise ConfigError if --mask-prob or --short-seq-prob is out of range."""
        if not 0 < self.mask_prob < 1:
            raise ConfigError(
                f"--mask-prob {self.mask_prob}: give a fraction between 0 and 1, such as 0.15"
            )
        if not 0 <= self.short_seq_prob <= 1:
            raise ConfigError(
                f"--short-seq-prob {self.short_seq_prob}: give a fraction from 0 to 1, such as 0.1"
            )

    def max_predictions(self, seq_length: int) -> int:
        """Return the maximum number of predicted tokens of a BERT sample of `seq_length` tokens.
        Raises ConfigError if the flags are not valid."""
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
