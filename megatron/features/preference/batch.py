"""Batches of answers of which some are better than others.

Shape suffixes: R rows, two for each sample. A pair is a prompt with its better answer and then with
its worse one. A judged answer (kto) is a prompt with that answer and then with the answer to
another prompt. S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.data.texts import ScoredText

Rows = tuple[ScoredText, ScoredText]
"""The two rows of a sample: the context is the prompt, every token of the continuation counts."""


class PreferenceSample(NamedTuple):
    """One sample.

    Attributes:
        reference: log-probabilities of both answers under the reference model; None without one.
        desirable: kto: whether the first answer is good; None for pairs.
        margin: by how much the better answer of a pair is better; None where the data do not say.
    """

    rows: Rows
    reference: tuple[float, float] | None = None
    desirable: bool | None = None
    margin: float | None = None

    @property
    def length(self) -> int:
        """Tokens that the model reads of the longer row."""
        return max(len(row.context) + len(row.continuation) for row in self.rows) - 1


class PreferenceBatch(NamedTuple):
    """Answers and what is known of them.

    Attributes:
        answers: the rows [R, S] as a batch of the model's family, padded on the right, in which the
            tokens of the answers are predicted.
        reference_R: log-probability of each answer under the reference model, float32; None without
            one. For a loss of means over tokens it is the sum, too.
        desirable_R: kto: whether the first answer of each two rows is good, bool, the same in both;
            None for pairs.
        margin_R: by how much the better answer of each pair is better, float32, the same in both
            rows; None where the data do not say.
        weights_2: of the batch among those of a step, float64: of its loss, which is 1, and of its
            tokens whose loss counts. As collated they are sums; once the whole step is known,
            relative to the mean over its micro batches on all ranks.
        others_N: kto, in training: log-probability of each second row under the model, float64;
            ``answers`` are then the first rows only. None with all rows in ``answers``.
    """

    answers: Any
    reference_R: Tensor | None = None
    desirable_R: Tensor | None = None
    margin_R: Tensor | None = None
    weights_2: Tensor | None = None
    others_N: Tensor | None = None

    @property
    def tokens_BS(self) -> Tensor:
        """All that the model reads."""
        return self.answers.tokens_BS

    def lengthened(self, seq_length: int) -> PreferenceBatch:
        """With padding after every row, up to ``seq_length`` tokens."""
        return self._replace(answers=self.answers.lengthened(seq_length))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PreferenceBatch:
        return PreferenceBatch._make(
            None if part is None else part.to(device, non_blocking=non_blocking) for part in self
        )


@dataclass(frozen=True)
class PreferenceCollator:
    """Stacks samples into a PreferenceBatch.

    Attributes:
        batch_of: makes a batch of the model's family of texts and the length to pad them to.
        multiple: of which a batch's length is a multiple, except the longest that there is.
        longest: tokens of a row that the model reads at most.
        whole: the model reads all tokens of a row; else those before the last, which it predicts.
    """

    batch_of: Callable[[Sequence[ScoredText], int], Any]
    multiple: int
    longest: int
    whole: bool = False

    def __call__(self, samples: Sequence[PreferenceSample]) -> PreferenceBatch:
        needed = max(sample.length for sample in samples) + self.whole
        length = min(-(-needed // self.multiple) * self.multiple, self.longest)
        rows = [row for sample in samples for row in sample.rows]
        counted = len(rows) if self.whole else sum(len(row.continuation) for row in rows)
        return PreferenceBatch(
            self.batch_of(rows, length),
            _repeated([sample.reference for sample in samples], torch.float32),
            _repeated([sample.desirable for sample in samples], torch.bool),
            _repeated([sample.margin for sample in samples], torch.float32),
            torch.tensor([1.0, counted], dtype=torch.float64),
        )


@dataclass(frozen=True)
class WholeRows:
    """Makes a batch of rows by a function of their token ids, int64 [L] each, and a length."""

    batch_of: Callable[[Sequence[np.ndarray], int], Any]

    def __call__(self, texts: Sequence[ScoredText], length: int) -> Any:
        rows = [np.concatenate((text.context, text.continuation)) for text in texts]
        return self.batch_of(rows, length)


def _repeated(values: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    """Values of samples, one or two each, as one for each row; None where no sample has one."""
    if all(value is None for value in values):
        return None
    known = [0.0 if value is None else value for value in values]
    return torch.tensor(known, dtype=dtype).view(len(known), -1).expand(-1, 2).flatten()
