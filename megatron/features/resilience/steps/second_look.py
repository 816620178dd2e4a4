"""``--rerun-on-anomaly``: a step whose loss or gradient norm is out of bounds is computed again,
from the same state and before its update, to find the reason.

Another result the second time is a fault of the rank whose own numbers changed. The same result is
compared with that of other ranks: data-parallel ranks exchange their micro batches, and a rank that
computes other numbers than the others is faulty too. Else the step is what the model makes of this
data: bad samples if few of them stand out, a training that diverges if most do.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor

from megatron.data.loader import TrainingData, mapped
from megatron.engine.train_engine import TrainEngine
from megatron.families import family_of
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.steps.spikes import SpikeRule
from megatron.run.run import Run
from megatron.training.report import Reporter
from megatron.training.trainer import Callback, Trainer
from megatron.util.errors import FaultError

_SHOWN, _CHARACTERS = 4, 200
"""Samples that are shown, and parts of documents and characters of each."""


TOLERANCE = 1e-3
"""Relative difference of two computations of one number: GPUs add up in orders that differ."""

FAR, NEAR, TIMES = 0.5, 0.15, 6.0
"""Distance of a micro batch's log loss from the usual value that stands out: more than :data:`NEAR`
and :data:`TIMES` the distance of most of its step, or more than :data:`FAR`."""


@dataclass(frozen=True)
class Computed:
    """Results of one rank for the micro batches of one data-parallel rank.

    Attributes:
        place: its pipeline stage, context and tensor-parallel rank.
        of: the data-parallel rank whose micro batches they are.
        losses: of each of them; empty on stages that compute none.
        squares: sum of the squares of its gradients, before they are averaged over ranks.
    """

    rank: int
    host: str
    place: tuple[int, ...]
    of: int
    losses: tuple[float, ...]
    squares: float

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"

    def equals(self, other: Computed) -> bool:
        """True if the numbers are equal up to the order of summation."""
        mine, its = (*self.losses, self.squares), (*other.losses, other.squares)
        return len(mine) == len(its) and all(map(_close, mine, its))

    def oddness(self, usual: float) -> float:
        """Distance of the losses from the usual ones, as a logarithm."""
        return max((_off(loss, usual) for loss in self.losses), default=0.0)


def _close(a: float, b: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isnan(a) == math.isnan(b) and (math.isnan(a) or a == b)
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-12)


def _off(loss: float, usual: float) -> float:
    if not math.isfinite(loss) or loss <= 0 or usual <= 0:
        return 0.0 if loss == usual else math.inf
    # If a model has memorised its data, noise of this size is meaningless.
    return abs(math.log((loss + 0.01) / (usual + 0.01)))


def changed(first: Sequence[Computed], again: Sequence[Computed]) -> list[Computed]:
    """The ranks whose second result of the same step is another one."""
    return [a for a, b in zip(first, again, strict=True) if not a.equals(b)]


def wrong_ranks(
    own: Sequence[Computed], exchanged: Sequence[Computed], usual: float
) -> list[Computed]:
    """Return the ranks that compute micro batches otherwise than other data-parallel ranks do. Of
    two that differ, it is the one whose losses are farther from ``usual``, or both."""
    by = {(each.place, each.of): each for each in own}
    suspects: dict[int, int] = {}
    pairs = [(by[each.place, each.of], each) for each in exchanged]
    for mine, other in pairs:
        if not mine.equals(other):
            for each in (mine, other):
                suspects[each.rank] = suspects.get(each.rank, 0) + 1
    if not suspects:
        return []
    most = max(suspects.values())
    ranks = [each for each in own if suspects.get(each.rank) == most]
    if len(ranks) > 1:
        odd = {each.rank: 0.0 for each in ranks}
        for each in (*own, *exchanged):
            if each.rank in odd:
                odd[each.rank] += min(each.oddness(usual), 1e3)
        largest = max(odd.values())
        if min(odd.values()) < 0.9 * largest:
            ranks = [each for each in ranks if odd[each.rank] > 0.9 * largest]
    return ranks


@dataclass(frozen=True)
class OddBatches:
    """Micro batches (data-parallel rank, number) with losses that stand out, and the median of
    all."""

    batches: tuple[tuple[int, int], ...]
    total: int
    usual: float

    @property
    def few(self) -> bool:
        """True if they are a minority, so that the data is to blame."""
        return 0 < 2 * len(self.batches) < self.total


def odd_batches(computed: Sequence[Computed], usual: float | None) -> OddBatches:
    """Return the batches whose loss is far from ``usual``, by default the median of this step."""
    losses: Mapping[tuple[int, int], float] = {
        (each.of, number): loss for each in computed for number, loss in enumerate(each.losses)
    }
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    middle = usual if usual is not None else median(finite) if finite else 0.0
    offs = {place: _off(loss, middle) for place, loss in losses.items()}
    typical = median_low(offs.values()) if offs else 0.0
    limit = FAR if typical > FAR else max(NEAR, TIMES * typical)
    places = [place for place, off in offs.items() if off > limit]
    return OddBatches(tuple(sorted(places)), len(losses), middle)


class SecondLook(Callback):
    """Computes steps that are anomalies several times, by ``rule`` or because they are not
    finite."""

    def __init__(
        self,
        run: Run,
        engine: TrainEngine,
        data: TrainingData,
        report: Reporter,
        rule: SpikeRule | None,
    ) -> None:
        self._run, self._engine, self._data, self._report = run, engine, data, report
        self._rule = rule
        self._ends = run.config.section(ResilienceConfig).rerun_on_anomaly == "validate_results"
        self._usual: float | None = None
        self._iteration, self._seq_length = 0, run.config.model.seq_length
        self._squares = torch.zeros((), dtype=torch.float64, device=engine.device)
        for param in engine.trained:
            param.register_hook(self._add_squares)
        engine.judge = self.compute

    def before_step(self, trainer: Trainer) -> None:
        """Notes which step is computed next."""
        self._iteration = trainer.iteration + 1
        self._seq_length = trainer.plan.lengths.at(trainer.iteration)

    def went_back(self, trainer: Trainer) -> None:
        self._usual = None

    def compute(self, batches: list[Any], seeds: list[int | None], consumed_samples: int) -> Tensor:
        """Return the sums of a step's losses. Raises FaultError, on every rank, if one computes
        wrongly."""
        sums, own = self._attempt(batches, seeds)
        loss = self._engine.mean_losses(sums, len(batches))
        total = float(self._engine.spec.total(loss))
        norm = self._engine.norm_before_update()
        why = self._anomaly(total, None if norm is None else float(norm))
        if why is None:
            self._usual = total if self._usual is None else 0.7 * self._usual + 0.3 * total
            return sums
        self._explain(why, own, batches, seeds, consumed_samples)
        return self._again(batches, seeds)[0]

    def _anomaly(self, loss: float, norm: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if norm is not None and not math.isfinite(norm):
            return "the gradients are not finite"
        if self._rule is None:
            return None
        # A step without a norm is given the expected one.
        spike = self._rule.check(loss, math.nan if norm is None else norm, self._seq_length)
        return None if spike is None else str(spike)

    def _attempt(
        self, batches: list[Any], seeds: Sequence[int | None], of: int | None = None
    ) -> tuple[Tensor, Computed]:
        """Forward and backward of micro batches, of this or of another data-parallel rank."""
        mesh = self._engine.mesh
        self._squares.zero_()
        sums = self._engine.backend.accumulate(iter(batches), seeds)
        weights = torch.tensor(list(self._engine.spec.losses.values()), dtype=torch.float64)
        losses = [float((each.cpu() * weights).sum()) for each in self._engine.backend.losses]
        computed = Computed(
            mesh.world.rank,
            socket.gethostname(),
            (mesh.pipeline.rank, mesh.group("context").rank, mesh.tensor.rank),
            mesh.samples.rank if of is None else of,
            tuple(losses),
            float(self._squares),
        )
        return sums, computed

    def _again(
        self, batches: list[Any], seeds: Sequence[int | None], of: int | None = None
    ) -> tuple[Tensor, Computed]:
        self._engine.drop_gradients()
        return self._attempt(batches, seeds, of)

    def _add_squares(self, grad: Tensor | None) -> None:
        if grad is not None:  # None is followed by the gradient, which is added elsewhere
            self._squares += grad.detach().float().square().sum()

    def _explain(
        self,
        why: str,
        own: Computed,
        batches: list[Any],
        seeds: list[int | None],
        consumed_samples: int,
    ) -> None:
        """Says what the reason is. Raises FaultError if it is a rank."""
        what = f"iteration {self._iteration} is computed again before its update, since {why}"
        self._report.say(f"WARNING: {what}")
        first = self._engine.mesh.world.gathered(own)
        again = self._engine.mesh.world.gathered(self._again(batches, seeds)[1])
        wrong = self._suspects(changed(first, again), first)
        if wrong:
            self._blame(wrong, f"{what}: the second result is another one", "once")
            return
        data, where = self._engine.mesh.samples, ""
        if data.size > 1:
            theirs, their_seeds, of = self._next_ranks(batches, seeds)
            exchanged = self._engine.mesh.world.gathered(self._again(theirs, their_seeds, of)[1])
            usual = odd_batches(first, self._usual).usual
            wrong = self._suspects(wrong_ranks(first, exchanged, usual), first)
            if wrong:
                self._blame(
                    wrong, f"{what}: other ranks compute its micro batches otherwise", "every time"
                )
                return
            where = ", on any rank"
        odd = odd_batches(first, self._usual)
        self._report.say(f"the result is the same again{where}; {self._words(odd)}")
        self._show(odd, consumed_samples)

    def _suspects(self, wrong: list[Computed], first: Sequence[Computed]) -> list[Computed]:
        """The ranks of which one may compute wrongly: where ranks divide sequences, all of a model,
        as each computes with the keys and the losses of the others."""
        if self._engine.mesh.group("context").size == 1:
            return wrong
        copies = {each.of for each in wrong}
        return [each for each in first if each.of in copies]

    def _blame(self, wrong: Sequence[Computed], what: str, how: str) -> None:
        ranks = sorted({str(each) for each in wrong})
        copies = {each.of for each in wrong}
        if len(ranks) == 1:
            who = f"{ranks[0]} computes wrongly"
        else:
            shared = " of one model" if len(copies) == 1 else ""
            who = f"one of the ranks{shared} {', '.join(ranks)} computes wrongly"
        hosts = ", ".join(sorted({each.host for each in wrong}))
        text = f"{what}: {who} ({how}), so that its processor or memory is faulty"
        if self._ends:
            raise FaultError(
                f"{text}; the weights are those before the step, and nothing is saved: restart "
                f"without {hosts} where it comes again"
            )
        self._report.say(f"WARNING: {text}")

    def _next_ranks(
        self, batches: list[Any], seeds: list[int | None]
    ) -> tuple[list[Any], list[int | None], int]:
        """The micro batches and seeds of the next data-parallel rank, and its number."""
        data, device = self._engine.mesh.samples, self._engine.device
        mine = [mapped(batch, Tensor, lambda values: values.cpu()) for batch in batches], seeds
        number = (data.rank + 1) % data.size
        theirs, their_seeds = data.gathered(mine)[number]
        moved = [mapped(batch, Tensor, lambda values: values.to(device)) for batch in theirs]
        return moved, their_seeds, number

    def _words(self, odd: OddBatches) -> str:
        resilience = self._run.config.section(ResilienceConfig)
        if odd.few:
            return (
                f"bad data: {len(odd.batches)} of {odd.total} micro batches are far from the usual "
                f"loss, {odd.usual:.4g}; --skip-samples leaves samples out"
            )
        if odd.batches and odd.total > 1:
            return (
                f"the training diverges: {len(odd.batches)} of {odd.total} micro batches are far "
                f"from the usual loss, {odd.usual:.4g}; a smaller --lr, a longer warm-up, or less "
                "--clip-grad"
            )
        act = f"--on-spike {resilience.on_spike} decides"
        if odd.batches:
            return f"bad data or a training that diverges: the step has one micro batch; {act}"
        return f"no micro batch stands out by its loss, so that the gradients diverge; {act}"

    def _show(self, odd: OddBatches, consumed_samples: int) -> None:
        """Numbers, documents, files and text of the samples that stand out."""
        train, config = self._data.datasets.train, self._run.config
        if train is None or not self._report.main or not odd.batches:
            return
        per_rank = config.training.micro_batch_size
        per_round = per_rank * self._engine.mesh.samples.size
        numbers = sorted(
            consumed_samples + number * per_round + of * per_rank + sample
            for of, number in odd.batches
            for sample in range(per_rank)
        )
        data = family_of(config.model.family).data(config, self._run.tokenizer)
        for number in numbers[:_SHOWN]:
            try:
                origin = train.origin(number)
                pieces = "; ".join(
                    f"{piece.source} {data.unit} {piece.sequence} tokens {piece.start}:{piece.stop}"
                    for piece in origin[:_SHOWN]
                )
                pieces += f"; {len(origin) - _SHOWN} more" * (len(origin) > _SHOWN)
                views = data.views(train[number], self._seq_length)
                text = " | ".join(view.text for view in views)[:_CHARACTERS]
            except (ValueError, OSError, AttributeError, NotImplementedError) as error:
                pieces, text = "", f"cannot be shown ({error})"
            skip = f"--skip-samples {number}:{number + 1}"
            self._report.say(f"sample {number} ({skip}): {pieces}: {text!r}")
        if len(numbers) > _SHOWN:
            rest = f"{numbers[_SHOWN]} to {numbers[-1]}"
            self._report.say(f"and {len(numbers) - _SHOWN} more of the samples {rest}")
