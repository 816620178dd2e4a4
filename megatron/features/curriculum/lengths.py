"""Sequence lengths that grow over a run, to which samples are truncated or folded."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.gpt_batch import GPTBatch
from megatron.data.samples import SequenceLengths


class GrowingLengths(SequenceLengths):
    """Sequence lengths that grow over a run. `stages` are pairs (step, length from this step on),
    in ascending order from step 0. `samples` returns the number of samples consumed after a number
    of steps. Samples are truncated or, with `folds` (the number of samples in a micro batch),
    folded into more rows. `counted` is the number of tokens of a row that count in each stage, by
    default all."""

    grows = True

    def __init__(
        self,
        seq_length: int,
        stages: Sequence[tuple[int, int]],
        samples: Callable[[int], int],
        folds: int | None = None,
        counted: Sequence[int] = (),
    ) -> None:
        super().__init__(seq_length)
        self.folds, self.stages = folds, tuple(stages)
        self._steps, self._lengths = zip(*self.stages, strict=True)
        self._samples = [samples(step) for step in self._steps]
        pairs = zip(self._lengths, counted or self._lengths, strict=True)
        self._rates = [self._rate(length, count) for length, count in pairs]
        self._tokens = [0]
        for rate, (start, stop) in zip(self._rates, pairwise(self._samples), strict=False):
            self._tokens.append(self._tokens[-1] + int((stop - start) * rate))

    def _rate(self, length: int, counted: int) -> Fraction | int:
        """Return the number of tokens per sample that count."""
        if self.folds is None:
            return counted
        return Fraction(self._rows(length) * counted, self.folds)

    def _rows(self, length: int) -> int:
        """Return the rows of a folded micro batch, an even number, as in Megatron-DeepSpeed."""
        assert self.folds is not None
        if length == self.seq_length:
            return self.folds
        tokens, width = self.seq_length + 1, length + 1
        rows = min(-(-self.folds * tokens // width), self.folds * (tokens // width + 1))
        return rows - rows % 2 if rows > 1 else rows

    def at(self, iteration: int) -> int:
        return self._lengths[bisect.bisect_right(self._steps, iteration) - 1]

    def tokens(self, consumed_samples: int) -> int:
        stage = bisect.bisect_right(self._samples, consumed_samples) - 1
        more = int((consumed_samples - self._samples[stage]) * self._rates[stage])
        return self._tokens[stage] + more

    def samples(self, tokens: int) -> int:
        stage = max(0, bisect.bisect_left(self._tokens, tokens) - 1)
        missing = tokens - self._tokens[stage]
        return self._samples[stage] + -(-missing // self._rates[stage])

    def cut(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        length = self.at(iteration)
        if self.folds is not None and length < self.seq_length:
            return (folded(batch, length, self._rows(length)) for batch in batches)
        return batches if length == self.seq_length else (truncated(b, length) for b in batches)


def truncated(batch: Any, seq_length: int) -> Any:
    """Return the first tokens of every sample. Raises ValueError if a batch does not allow it."""
    if not hasattr(batch, "shortened"):
        raise ValueError(
            f"a {type(batch).__name__} cannot be cut: remove curriculum_learning or seqlen_truncate"
        )
    return batch.shortened(seq_length)


def folded(batch: Any, seq_length: int, rows: int) -> GPTBatch:
    """Fold a GPT's batch into rows of ``seq_length`` tokens and their labels, followed by a row
    with the end of each sample, at most ``rows`` in total. Raises ValueError for others."""
    if not isinstance(batch, GPTBatch):
        raise ValueError(
            f"seqlen_reshape divides the text of a GPT's samples; a {type(batch).__name__} is made "
            "of parts that belong together: use seqlen_truncate"
        )
    assert batch.positions_BP is None and batch.weights_2 is None and batch.keys_B is None
    width, length = seq_length + 1, batch.tokens_BS.shape[1] + 1
    whole = length // width * width

    def fold(values_BT: Tensor) -> Tensor:
        parts = values_BT[:, :whole].reshape(-1, width), values_BT[:, -width:]
        return torch.cat(parts)[:rows]

    def of_inputs(values_BS: Tensor | None) -> Tensor | None:
        return None if values_BS is None else fold(F.pad(values_BS, (0, 1)))[:, :-1].contiguous()

    text_RT = fold(torch.cat((batch.tokens_BS, batch.labels_BS[:, -1:]), dim=1))
    positions_RS = of_inputs(batch.position_ids_BS)
    if positions_RS is not None:
        # Positions must also restart at the beginning of each row.
        numbers_S = torch.arange(seq_length, device=positions_RS.device)
        starts_RS = torch.where(positions_RS == 0, numbers_S, 0).cummax(dim=1).values
        positions_RS = numbers_S - starts_RS
    mask_RS = of_inputs(batch.loss_mask_BS)
    assert mask_RS is not None
    return GPTBatch(
        text_RT[:, :-1].contiguous(),
        text_RT[:, 1:].contiguous(),
        mask_RS,
        positions_RS,
        of_inputs(batch.document_ids_BS),
    )
