"""How the samples of BERT and T5 are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.flags import ConfigError, option
from megatron.config.kinds import KindConfig

PAIR_TASKS = ("sentence-order", "next-sentence")


@dataclass(frozen=True)
class MaskedDataConfig(KindConfig):
    """Masked data: how the samples of BERT and T5 are made."""

    mask_prob: float = option(0.15)
    """Share of a sample's tokens that are to be predicted."""
    short_seq_prob: float = option(0.1)
    """Share of samples that are made for a shorter length, drawn evenly from 2 tokens up."""
    max_preds_per_seq: int | None = option(
        None, derived="seq-length x mask-prob, up to a multiple of 10"
    )
    """BERT: most tokens of a sample that are to be predicted."""
    max_ngrams: int = option(3)
    """BERT: most words in a row that are masked together; n words have a chance in proportion to
    1/n. 1 masks single words."""
    favor_longer_ngram: bool = option(False)
    """BERT: turn the chances of --max-ngrams round, so that more words together are likelier."""
    whole_word_masking: bool = option(True, off="--no-whole-word-masking")
    """BERT: choose tokens by themselves, instead of all tokens of a word or none."""
    bert_binary_head: bool = option(True, off="--bert-no-binary-head")
    """BERT: one segment a sample, instead of two and a second head that tells whether they belong
    together."""
    bert_pair_task: str = option("sentence-order", choices=PAIR_TASKS)
    """BERT: what the second head tells: whether the two segments of a document have been swapped
    (as Megatron and ALBERT), or whether the second one comes from another document (as BERT)."""
    encoder_seq_length: int | None = option(None, derived="seq-length")
    """T5: tokens of the encoder's input."""
    decoder_seq_length: int | None = option(
        None, derived="what an encoder input needs at most, up to a multiple of 64"
    )
    """T5: tokens of the decoder's input and of the labels."""
    mean_noise_span_length: float = option(3.0)
    """T5: mean number of tokens that one sentinel stands for."""
    max_noise_span_length: int = option(10)
    """T5: most tokens that one sentinel stands for."""
    use_tfrecords: bool = option(False)
    """BERT: the data paths name TFRecord files of google-research/bert's
    create_pretraining_data.py, masked already."""

    files: ClassVar[str | None] = "tfrecord"
    samples: ClassVar[str] = "masked"
    idle: ClassVar[str] = "a GPT's data are not masked"

    @property
    def reads_all(self) -> bool:
        """See `KindConfig.reads_all`."""
        return self.use_tfrecords

    def check_shares(self) -> None:
        """Check the values that are shares.

        Raises:
            ConfigError: one is out of its range.
        """
        if not 0 < self.mask_prob < 1:
            raise ConfigError(
                f"--mask-prob {self.mask_prob}: give a share between 0 and 1, such as 0.15"
            )
        if not 0 <= self.short_seq_prob <= 1:
            raise ConfigError(
                f"--short-seq-prob {self.short_seq_prob}: give a share from 0 to 1, such as 0.1"
            )

    def max_predictions(self, seq_length: int) -> int:
        """Most tokens of a sample of `seq_length` tokens that BERT is to predict.

        Raises:
            ConfigError: the flag is not above 0.
        """
        if self.max_preds_per_seq is None:
            return math.ceil(seq_length * self.mask_prob / 10) * 10
        if self.max_preds_per_seq < 1:
            raise ConfigError(
                f"--max-preds-per-seq {self.max_preds_per_seq}: give a number of tokens from 1 on"
            )
        return self.max_preds_per_seq
