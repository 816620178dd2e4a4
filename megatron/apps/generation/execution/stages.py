"""Run a model's layers over the ranks of a layout, as generation needs it: forward only, any range
of consecutive layers, one batch at a time. Also compute logits and scores from the last layer.

Shapes: H hidden, R rows whose logits are requested, T targets, A most probable tokens of a target,
V vocabulary, P one tensor-parallel rank's columns of the padded vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.apps.generation.execution.row_rule import RowRule
from megatron.apps.generation.request import SequencePart, StepOutput, TargetScores
from megatron.engine.pipeline_module import StageModule
from megatron.engine.train_engine import ModelEngine
from megatron.model.layer_list import LayerSequence, LayerSpec, LayerStack, LayerState
from megatron.parallel.mesh import Group, Mesh


class EncoderOutput(NamedTuple):
    """Encoder output of a pass: its number of ``tokens``, and a function ``crosses`` that returns
    whether it must be sent to the stage that begins with a given layer."""

    tokens: int
    crosses: Callable[[int], bool]


@dataclass(frozen=True)
class StagedLayers:
    """Layers of a model, divided into pipeline stages.

    ``bounds`` contains the first layer of each stage, then the number of layers. ``owners``
    contains the pipeline rank of each stage. ``own`` contains this process's stages by number, and
    ``weights`` the matrices of their layers. The last stage contains the head, followed by the MTP
    layers."""

    bounds: Sequence[int]
    owners: Sequence[int]
    own: Mapping[int, LayerSequence]
    weights: Sequence[Tensor]
    mesh: Mesh
    hidden: int
    dtype: torch.dtype
    device: torch.device
    specs: Sequence[LayerSpec]

    @classmethod
    def of(cls, engine: ModelEngine) -> StagedLayers:
        model, mesh, hidden = engine.model, engine.mesh, engine.config.model.hidden_size
        if isinstance(model, LayerStack):
            return cls.alone(model, hidden, mesh)
        assert isinstance(model, StageModule)
        owners = [model.stage_owner(first) for first in model.parts[:-1]]
        weights = _matrices(model)
        dtype, device = next(model.parameters()).dtype, engine.device
        parts, own = model.parts, model.sequences
        return cls(parts, owners, own, weights, mesh, hidden, dtype, device, model.specs)

    @classmethod
    def alone(cls, model: LayerStack, hidden: int, mesh: Mesh | None = None) -> StagedLayers:
        """Return the stages of a model that is not split over pipeline ranks."""
        weights = _matrices(model)
        bounds, stages = (0, len(model.layers)), {0: model.sequence}
        first = next(model.parameters())
        dtype, device = first.dtype, first.device
        mesh = mesh or Mesh()
        return cls(bounds, (0,), stages, weights, mesh, hidden, dtype, device, model.layers)

    @property
    def layers(self) -> int:
        """Number of layers up to and including the head, without MTP layers."""
        return sum(spec.ahead is None for spec in self.specs)

    @property
    def ahead(self) -> list[range]:
        """Layer ranges of the MTP blocks, each without its head. Layers that several MTP blocks
        share appear once."""
        places: dict[tuple[str, ...], range] = {}
        for number in {spec.ahead for spec in self.specs} - {None}:
            of = [place for place, spec in enumerate(self.specs) if spec.ahead == number]
            names = tuple(self.specs[place].name for place in of)
            places.setdefault(names, range(of[0], of[-1]))
        return sorted(places.values(), key=lambda layers: layers.start)

    @property
    def last(self) -> bool:
        """True if this process has the last stage."""
        return self.owners[-1] == self._pipeline.rank

    def last_part(self, layers: range) -> LayerSequence:
        """Return some layers of the last stage. Only valid in the process that has this stage."""
        return self.own[max(self.own)].part(layers.start, layers.stop)

    @property
    def last_rank(self) -> int:
        """Global rank of the process with the last stage of this pipeline."""
        return self._pipeline.ranks[self.owners[-1]]

    @property
    def _pipeline(self) -> Group:
        return self.mesh.pipeline

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of this process."""
        return [block for stage in sorted(self.own) for block in self.own[stage].blocks]

    def run(
        self,
        state: LayerState,
        tokens: int,
        first: int,
        end: int,
        encoded: EncoderOutput | None = None,
    ) -> LayerState | None:
        """Run the layers ``first`` to ``end`` - 1. Return the state after them on the rank with the
        last of these layers, None on the others. Hidden states [1, ``tokens``, H] and encoder
        outputs are sent between stages. Collective: every pipeline rank must call it."""
        pipeline, holder = self._pipeline, None
        reached = state
        for stage, owner in enumerate(self.owners):
            begin, stop = max(first, self.bounds[stage]), min(end, self.bounds[stage + 1])
            if begin >= stop:
                continue
            if holder not in (None, owner):
                length = 0 if encoded is None or not encoded.crosses(begin) else encoded.tokens
                if holder == pipeline.rank:
                    self._send(reached.hidden, owner)
                    if length:
                        assert reached.encoder is not None
                        self._send(reached.encoder, owner)
                elif owner == pipeline.rank:
                    reached = state.changed(hidden=self._received(tokens, holder))
                    if length:
                        reached = reached.changed(encoder=self._received(length, holder))
            if owner == pipeline.rank:
                reached = self.own[stage].part(begin, stop)(reached)
            holder = owner
        return reached if holder == pipeline.rank else None

    def broadcast(self, hidden: Tensor | None, tokens: int, layer: int) -> Tensor:
        """Return hidden states [1, ``tokens``, H] on all pipeline ranks, broadcast from the rank
        that has ``layer``."""
        hidden = self._empty(tokens) if hidden is None else hidden.contiguous()
        self.share(hidden, layer)
        return hidden

    def share(self, x: Tensor, layer: int) -> None:
        """Broadcast ``x`` in place from the rank that has ``layer`` to all pipeline ranks."""
        pipeline = self._pipeline
        stage = max(s for s, start in enumerate(self.bounds[:-1]) if start <= layer)
        if pipeline.size > 1:
            dist.broadcast(x, pipeline.ranks[self.owners[stage]], group=pipeline.handle)

    def _empty(self, tokens: int) -> Tensor:
        return torch.empty(1, tokens, self.hidden, dtype=self.dtype, device=self.device)

    def _send(self, hidden: Tensor, owner: int) -> None:
        pipeline = self._pipeline
        dist.send(hidden.contiguous(), pipeline.ranks[owner], group=pipeline.handle)

    def _received(self, tokens: int, holder: int | None) -> Tensor:
        assert holder is not None
        pipeline, hidden = self._pipeline, self._empty(tokens)
        dist.recv(hidden, pipeline.ranks[holder], group=pipeline.handle)
        return hidden


def _matrices(model: nn.Module) -> list[Tensor]:
    """Return the matrices for which a :class:`RowRule` is measured.

    Stacked experts are represented by the first one. Matrices that a layer multiplies in parts are
    listed by part. Two kinds are left out: matrices with few columns, which are the taps of
    convolutions, and layers marked ``only_trained``, which do not affect the generated text."""
    unread = {
        param
        for module in model.modules()
        if getattr(module, "only_trained", False)
        for param in module.parameters()
    }
    kept = [param for param in model.parameters() if param not in unread]
    params = [p for p in kept if p.ndim in (2, 3) and p.shape[-1] >= _FEW]
    parts = [part for module in model.modules() for part in getattr(module, "row_matrices", ())]
    return [*(param if param.ndim == 2 else param.detach()[0] for param in params), *parts]


_FEW = 8
_CHUNK_BYTES = 64 * 2**20  # maximum size of float32 logits computed at a time
Numbers = tuple[Tensor, Tensor, Tensor, Tensor]
"""Logits, float32 [R, V]; log-probabilities of the targets, float32 [T]; the most probable tokens,
int64 [T, A]; and their log-probabilities, float32 [T, A]."""


@dataclass(frozen=True)
class WantedRows:
    """Rows of a step whose results are requested, numbered over the tokens of all parts: ``rows``
    for logits, ``scored`` for the log-probabilities of ``targets``. For each part with targets,
    ``counts`` contains the number of targets and of most probable tokens."""

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
                rows += range(begin - (len(part.tokens) if part.decoding else 1), begin)
        targets = tuple(token for part in parts for token in part.targets)
        counts = tuple((len(part.targets), part.top) for part in parts if part.targets)
        return cls(tuple(rows), tuple(scored), targets, counts)

    @property
    def top(self) -> int:
        return max((top for _, top in self.counts), default=0)

    def empty(self, vocab_size: int) -> Numbers:
        """Return uninitialised CPU tensors for the results."""
        count, top = len(self.scored), self.top
        return (
            torch.empty(len(self.rows), vocab_size),
            torch.empty(count),
            torch.empty(count, top, dtype=torch.int64),
            torch.empty(count, top),
        )

    def result(self, numbers: Numbers, drafts: tuple[tuple[int, ...], ...] = ()) -> StepOutput:
        logits_RV, logprobs_T, tokens_TA, top_TA = (each.cpu() for each in numbers)
        scores, begin = [], 0
        for count, top in self.counts:
            at = slice(begin, begin + count)
            scores.append(TargetScores(logprobs_T[at], tokens_TA[at, :top], top_TA[at, :top]))
            begin += count
        return StepOutput(logits_RV, tuple(scores), drafts)


class Head:
    """Last layer of the last pipeline stage, computed for a limited number of rows at a time."""

    def __init__(self, stages: StagedLayers, vocab_size: int, rule: RowRule) -> None:
        self._layer = stages.last_part(range(stages.layers - 1, stages.layers))
        self._group, self._device = stages.mesh.tensor, stages.device
        self._vocab_size, self._rule = vocab_size, rule
        fits = max(rule.fewest, _CHUNK_BYTES // (4 * vocab_size))
        self._most = fits if rule.most is None else rule.most

    def numbers(self, state: LayerState, asked: WantedRows) -> Numbers:
        """Return the requested results, given the state before the head. They are the same on all
        tensor-parallel ranks."""
        logits_RV, *scores = asked.empty(self._vocab_size)
        for at in self._chunks(len(asked.rows)):
            logits_CP = self._logits(state, asked.rows[at])
            whole_CV = whole_logits(logits_CP, self._vocab_size, self._group)
            logits_RV[at] = whole_CV[: len(asked.rows[at])].cpu()
        for at in self._chunks(len(asked.scored)):
            count = len(asked.scored[at])
            logits_CP = self._logits(state, asked.scored[at])
            targets_C = torch.zeros(len(logits_CP), dtype=torch.int64)
            targets_C[:count] = torch.tensor(asked.targets[at])
            results = score_rows(
                logits_CP, targets_C.to(self._device), asked.top, self._vocab_size, self._group
            )
            for place, each in zip(scores, results, strict=True):
                place[at] = each[:count].cpu()
        return logits_RV, scores[0], scores[1], scores[2]

    def _chunks(self, rows: int) -> list[slice]:
        return [slice(first, first + self._most) for first in range(0, rows, self._most)]

    def best(self, hidden_1TH: Tensor) -> Tensor:
        """Return the most probable token after each state before the head, int64 [T]."""
        logits_TP = self._layer(LayerState(hidden_1TH)).hidden[0]
        return whole_logits(logits_TP, self._vocab_size, self._group).argmax(-1)

    def _logits(self, state: LayerState, rows: Sequence[int]) -> Tensor:
        """Return the logits [C or more, P] of the given rows. Padding repeats the first row."""
        padded = [*rows, *[rows[0]] * (self._rule.padded(len(rows)) - len(rows))]
        hidden = state.hidden.index_select(1, torch.tensor(padded, device=self._device))
        return self._layer(state.with_hidden(hidden)).hidden[0]


def whole_logits(logits_RP: Tensor, vocab_size: int, group: Group) -> Tensor:
    """All-gather the columns of the tensor-parallel ranks. Return float32 [R, V] on every rank."""
    return torch.cat(_gathered(logits_RP, group), dim=1)[:, :vocab_size].float()


def score_rows(
    logits_RP: Tensor, targets_R: Tensor, top: int, vocab_size: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability, float32 [R], of a target in each row, and the ``top`` most
    probable tokens with their log-probabilities, best first, int64 and float32 [R, top]. The
    results are the same on every rank."""
    columns = logits_RP.shape[1]
    first = group.rank * columns
    logits_RP = logits_RP.float()
    # Mask the padding instead of slicing it off, so that rows are summed independently.
    logits_RP[:, max(0, min(columns, vocab_size - first)) :] = -torch.inf
    own_R = targets_R - first
    absent_R = (own_R < 0) | (own_R >= columns)
    target_R = logits_RP.gather(1, own_R.masked_fill(absent_R, 0)[:, None])[:, 0]
    target_R = target_R.masked_fill(absent_R, -torch.inf)
    best = logits_RP.topk(min(top, columns), -1)
    largest_R = logits_RP.amax(-1)
    # A rank may have padding columns only, and -inf - -inf would be NaN.
    finite_R1 = largest_R.clamp(min=torch.finfo(torch.float32).min)[:, None]
    sums_R = (logits_RP - finite_R1).exp_().sum(-1)
    # Continue in float64, which hides rounding differences between batches.
    norms_R = sums_R.double().log() + largest_R.double()
    if group.size > 1:
        norms_R = torch.stack(_gathered(norms_R, group)).logsumexp(0)
        target_R = torch.stack(_gathered(target_R, group)).amax(0)
        values_RK = torch.cat(_gathered(best.values, group), 1)
        tokens_RK = torch.cat(_gathered(best.indices + first, group), 1)
    else:
        values_RK, tokens_RK = best
    # The sort is stable: ties go to the lower token id, as in the logits of one rank.
    order_RK = values_RK.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    top_logprobs = (values_RK.gather(1, order_RK).double() - norms_R[:, None]).float()
    logprobs = (target_R.double() - norms_R).float()
    return logprobs, tokens_RK.gather(1, order_RK), top_logprobs


def _gathered(x: Tensor, group: Group) -> list[Tensor]:
    if group.size == 1:
        return [x]
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(parts, x, group=group.handle)
    return parts
