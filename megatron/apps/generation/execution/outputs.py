"""What the parts of a step want of the model: logits of some rows, scores of others.

Shapes: R rows whose logits are wanted, T targets, A most probable tokens of a target, V vocabulary,
P one tensor-parallel rank's columns of it, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.apps.generation.execution.row_rule import RowRule
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.generation.execution.target_scores import score_rows, whole_logits
from megatron.apps.generation.step import (
    SequencePart,
    StepOutput,
    TargetScores,
)
from megatron.model.layer_list import LayerState

CHUNK_BYTES = 64 * 2**20
"""Of float32 logits at a time."""

Numbers = tuple[Tensor, Tensor, Tensor, Tensor]
"""Logits float32 [R, V]; of the targets log-probabilities float32 [T], most probable tokens int64
[T, A] and their log-probabilities float32 [T, A]."""


@dataclass(frozen=True)
class WantedRows:
    """Rows among the tokens of all parts, and what is wanted of them.

    Attributes:
        rows: whose logits are wanted.
        scored: rows of the targets.
        counts: targets and most probable tokens of each part that has any.
    """

    rows: tuple[int, ...]
    scored: tuple[int, ...]
    targets: tuple[int, ...]
    counts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, parts: Sequence[SequencePart]) -> WantedRows:
        rows: list[int] = []
        scored: list[int] = []
        begin = 0
        for part in parts:
            scored += range(begin, begin + len(part.targets))
            begin += len(part.tokens)
            if part.logits:
                rows.append(begin - 1)
        targets = tuple(token for part in parts for token in part.targets)
        counts = tuple((len(part.targets), part.top) for part in parts if part.targets)
        return cls(tuple(rows), tuple(scored), targets, counts)

    @property
    def top(self) -> int:
        return max((top for _, top in self.counts), default=0)

    def empty(self, vocab_size: int) -> Numbers:
        """Memory for the numbers, on the CPU."""
        count, top = len(self.scored), self.top
        return (
            torch.empty(len(self.rows), vocab_size),
            torch.empty(count),
            torch.empty(count, top, dtype=torch.int64),
            torch.empty(count, top),
        )

    def result(self, numbers: Numbers) -> StepOutput:
        logits_RV, logprobs_T, tokens_TA, top_TA = (each.cpu() for each in numbers)
        scores, begin = [], 0
        for count, top in self.counts:
            at = slice(begin, begin + count)
            scores.append(TargetScores(logprobs_T[at], tokens_TA[at, :top], top_TA[at, :top]))
            begin += count
        return StepOutput(logits_RV, tuple(scores))


class Head:
    """The last layer of the last pipeline stage, for some rows at a time."""

    def __init__(self, stages: StagedLayers, vocab_size: int, rule: RowRule) -> None:
        self._layer = stages.own[max(stages.own)].part(stages.layers - 1, stages.layers)
        self._group, self._device = stages.mesh.tensor, stages.device
        self._vocab_size, self._rule = vocab_size, rule
        fits = max(rule.fewest, CHUNK_BYTES // (4 * vocab_size))
        self._most = fits if rule.most is None else rule.most

    def numbers(self, state: LayerState, wanted: WantedRows) -> Numbers:
        """From the state before the head to what is wanted; the same on all tensor-parallel
        ranks."""
        logits_RV, *scores = wanted.empty(self._vocab_size)
        for at in self._chunks(len(wanted.rows)):
            logits_CP = self._logits(state, wanted.rows[at])
            whole_CV = whole_logits(logits_CP, self._vocab_size, self._group)
            logits_RV[at] = whole_CV[: len(wanted.rows[at])].cpu()
        for at in self._chunks(len(wanted.scored)):
            count = len(wanted.scored[at])
            logits_CP = self._logits(state, wanted.scored[at])
            targets_C = torch.zeros(len(logits_CP), dtype=torch.int64)
            targets_C[:count] = torch.tensor(wanted.targets[at])
            found = score_rows(
                logits_CP, targets_C.to(self._device), wanted.top, self._vocab_size, self._group
            )
            for place, each in zip(scores, found, strict=True):
                place[at] = each[:count].cpu()
        return logits_RV, scores[0], scores[1], scores[2]

    def _chunks(self, rows: int) -> list[slice]:
        return [slice(first, first + self._most) for first in range(0, rows, self._most)]

    def _logits(self, state: LayerState, rows: Sequence[int]) -> Tensor:
        """[C or more, P]"""
        padded = [*rows, *[rows[0]] * (self._rule.padded(len(rows)) - len(rows))]
        hidden = state.hidden.index_select(1, torch.tensor(padded, device=self._device))
        return self._layer(state.with_hidden(hidden)).hidden[0]
