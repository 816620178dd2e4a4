"""Second look at anomalies (``--rerun-on-anomaly``): a step whose loss or gradient norm is out of
bounds is computed again, from the same state and before its update, to find the reason.

If the second result differs, the rank whose own numbers changed is faulty. If it is the same,
data-parallel ranks exchange their micro batches, and a rank whose results differ from the others'
is faulty too. Otherwise the anomaly is the model's response to this data. If a few samples stand
out, the samples are bad; if most do, the training diverges.
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
"""Maximum number of samples shown, of document spans per sample, and of characters per sample."""


TOLERANCE = 1e-3
"""Relative difference allowed between two computations, since GPUs vary the summation order."""

FAR, NEAR, TIMES = 0.5, 0.15, 6.0
"""Limits on the distance of a micro batch's log loss from the usual value. A micro batch stands out
if its distance exceeds both :data:`NEAR` and :data:`TIMES` times the median distance of the step.
If that median exceeds :data:`FAR`, the limit is FAR."""


@dataclass(frozen=True)
class Computed:
    """Results of one rank for the micro batches of one data-parallel rank.

    Attributes:
        place: pipeline, context-parallel and tensor-parallel rank.
        of: data-parallel rank that the micro batches belong to.
        losses: loss of each micro batch; empty on pipeline stages that compute no loss.
        squares: sum of the squared gradients, before they are averaged over ranks.
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
        """Return whether losses and squared gradients are equal up to the order of summation."""
        mine, its = (*self.losses, self.squares), (*other.losses, other.squares)
        return len(mine) == len(its) and all(map(_close, mine, its))

    def oddness(self, usual: float) -> float:
        """Return the largest distance of a log loss from the logarithm of ``usual``."""
        return max((_off(loss, usual) for loss in self.losses), default=0.0)


def _close(a: float, b: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isnan(a) == math.isnan(b) and (math.isnan(a) or a == b)
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-12)


def _off(loss: float, usual: float) -> float:
    if not math.isfinite(loss) or loss <= 0 or usual <= 0:
        return 0.0 if loss == usual else math.inf
    # The offset keeps noise from counting when losses are near 0, as for memorised data.
    return abs(math.log((loss + 0.01) / (usual + 0.01)))


def changed(first: Sequence[Computed], again: Sequence[Computed]) -> list[Computed]:
    """Return the first results of the ranks whose second results for the same step differ."""
    return [a for a, b in zip(first, again, strict=True) if not a.equals(b)]


def wrong_ranks(
    own: Sequence[Computed], exchanged: Sequence[Computed], usual: float
) -> list[Computed]:
    """Return the ranks whose results for the same micro batches differ from other data-parallel
    ranks'. If two ranks differ from each other, return the one whose losses are farther from
    ``usual``, or both if that is unclear."""
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
    """Micro batches with losses that stand out, as (data-parallel rank, index). ``total`` counts
    all micro batches of the step, and ``usual`` is the loss with which they were compared."""

    batches: tuple[tuple[int, int], ...]
    total: int
    usual: float

    @property
    def few(self) -> bool:
        """True if the micro batches that stand out are a minority, which suggests bad data."""
        return 0 < 2 * len(self.batches) < self.total


def odd_batches(computed: Sequence[Computed], usual: float | None) -> OddBatches:
    """Return the micro batches with a loss far from ``usual``, or from the step's median loss if
    ``usual`` is None."""
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
    """Callback that recomputes anomalous steps: spikes by ``rule`` and non-finite results."""

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
        """Record the iteration and sequence length of the next step."""
        self._iteration = trainer.iteration + 1
        self._seq_length = trainer.plan.lengths.at(trainer.iteration)

    def went_back(self, trainer: Trainer) -> None:
        self._usual = None

    def compute(self, batches: list[Any], seeds: list[int | None], consumed_samples: int) -> Tensor:
        """Compute the gradients of a step, again if it is anomalous, and return the sums of its
        losses. Raises FaultError on every rank if one rank computes incorrectly."""
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
        # For NaN, the rule judges only the loss.
        spike = self._rule.check(loss, math.nan if norm is None else norm, self._seq_length)
        return None if spike is None else str(spike)

    def _attempt(
        self, batches: list[Any], seeds: Sequence[int | None], of: int | None = None
    ) -> tuple[Tensor, Computed]:
        """Run forward and backward passes of micro batches. ``of`` is the data-parallel rank to
        which they belong; None means this rank."""
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
        # None: a later call gets the gradient, which is accumulated outside of autograd
        if grad is not None:
            self._squares += grad.detach().float().square().sum()

    def _explain(
        self,
        why: str,
        own: Computed,
        batches: list[Any],
        seeds: list[int | None],
        consumed_samples: int,
    ) -> None:
        """Recompute and explain an anomalous step. Raises FaultError if a faulty rank ends the
        run."""
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
        """Return the ranks that may be the faulty one. With context parallelism these are all ranks
        of a model replica, because each computes with the keys and losses of the others."""
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
        """Return the micro batches, seeds and number of the next data-parallel rank. Collective:
        every data-parallel rank must call this."""
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
        """Print the numbers, documents, files and text of the samples that stand out."""
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
