"""Compares, bit by bit, what several ranks have copies of, and finds who differs.

Which ranks have copies follows from the mesh, each parameter's ``Shard`` and the ZeRO stage: model
weights over data-parallel ranks (stages 0 to 2), uncut ones over tensor-parallel ranks, tied layers
over pipeline stages, and the optimizer's state of all these. Main weights are a copy too: rounded,
they are the model's. A comparison reads every copy once and exchanges 24 bytes for each.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.optimizer import STATES
from megatron.engine.deepspeed_patches import partition_range
from megatron.engine.state import (
    OwnedSlice,
    has_main_weights,
    holders,
    loss_scaler_state,
    owned_slices,
)
from megatron.engine.train_engine import TrainEngine
from megatron.features.resilience.steps.checksum import bits_of, checksum
from megatron.parallel.mesh import SHARDED, Group, any_rank
from megatron.parallel.shard import Shard, shard_of
from megatron.training.trainer import Callback, Trainer
from megatron.util.errors import FaultError

WEIGHT, GATHERED, MAIN = "weight", "gathered weight", "main weight"

_SHOWN = 3  # differing tensors that a message describes


OTHERS_DIFFER, OWN_DIFFERS = 1, 2
"""Marks of a rank's weights: they differ from the rounded main weights of all ranks, or from its
own main weights."""


@dataclass(frozen=True)
class Holder:
    """A rank with a copy: its checksum, and the verdict of the main weights."""

    rank: int
    host: str
    value: int
    mark: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class ReplicaVerdict:
    """Ranks with a wrong copy.

    Attributes:
        wrong: in the order of ranks.
        right: those that it differs from; no rank if a rank's main weights differ from the weights
            that it shares with all others.
        sure: True if these are certainly the wrong ones: with two copies it is uncertain.
    """

    wrong: tuple[Holder, ...]
    right: tuple[Holder, ...]
    sure: bool = True

    @classmethod
    def of(cls, holders: Sequence[Holder], partitioned: bool) -> ReplicaVerdict:
        """By the main weights, where there are any, else by the majority. ``partitioned``:
        checksums are sums over ranks (ZeRO 3), so that a mark concerns all."""
        values = [holder.value for holder in holders]
        marked = [holder for holder in holders if holder.mark]
        if marked:
            own = tuple(h for h in marked if h.mark & OWN_DIFFERS) or tuple(marked)
            if len(set(values)) == 1 or partitioned:
                return cls(own, ())
            if len(marked) < len(holders):
                right = [h for h in holders if not h.mark and h.value != marked[0].value]
                return cls(tuple(marked), tuple(right)) if right else cls(own, ())
        classes = sorted(set(values), key=lambda value: (-values.count(value), values.index(value)))
        right = [holder for holder in holders if holder.value == classes[0]]
        wrong = [holder for holder in holders if holder.value != classes[0]]
        return cls(tuple(wrong), tuple(right), 2 * len(right) > len(holders))

    @property
    def of_main(self) -> bool:
        """True if a rank differs from itself."""
        return not self.right

    def among(self, ranks: Collection[int]) -> ReplicaVerdict:
        """The same about these ranks, where some of them are wrong."""
        wrong = tuple(holder for holder in self.wrong if holder.rank in ranks)
        right = tuple(holder for holder in self.right if holder.rank in ranks)
        return replace(self, wrong=wrong or self.wrong, right=right or self.right)

    def words(self, how: str) -> str:
        """Who differs from whom; ``how`` says in what."""
        wrong, right = joined(self.wrong), joined(self.right)
        verb = "differs" if len(self.wrong) == 1 else "differ"
        how = f" {how}" if how else ""
        if self.of_main:
            return f"on {wrong} the model's weights are not its main weights{how}"
        unsure = "" if self.sure else "; no majority has one of them, so either may be wrong"
        return f"{wrong} {verb} from {right}{how}{unsure}"


def joined(holders: Sequence[Holder]) -> str:
    """The ranks in words, with their hosts."""
    *first, last = map(str, holders) if holders else [""]
    return f"{', '.join(first)} and {last}" if first else last


@dataclass(frozen=True)
class Copied:
    """Something that is the same on all ranks with its ``key``: the ``kind`` of state of ``param``,
    or of the run. If it is ``summed``, data-parallel ranks have a part of it each."""

    key: str
    name: str
    kind: str
    param: nn.Parameter | None = None
    summed: bool = False


class Replicas:
    """Compares the copies of an engine's state. Every rank must make one, and call
    :meth:`difference` at the same time."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine, self._mesh, self._device = engine, engine.mesh, engine.device
        self._own: dict[nn.Parameter, OwnedSlice] = {}
        self._of_no_parameter: dict[str, list[Tensor]] = {}
        self._has_main = has_main_weights(engine)
        copies = list(self._all_copies())
        keys = [copied.key for copied in copies]
        assert len(set(keys)) == len(keys), "two tensors have one key"
        self._sharded = self._mesh.group(*SHARDED)
        count = Counter(key for of_rank in self._sharded.gathered(keys) for key in of_rank)
        places = {key: n for n, key in enumerate(sorted(k for k in count if count[k] > 1))}
        replicated = self._mesh.group("data", "context").size > 1
        self._copies = [
            copied
            for copied in copies
            if copied.key in places
            or (replicated and not copied.summed)
            or (self._has_main and copied.kind == WEIGHT and copied.param in engine.trained)
        ]
        """What exists once is left out."""
        self._summed = [n for n, copied in enumerate(self._copies) if copied.summed]
        self._with_main = [
            n
            for n, copied in enumerate(self._copies)
            if self._has_main and copied.kind == WEIGHT and copied.param in engine.trained
        ]
        self._common, keys = len(places), [copied.key for copied in self._copies]
        self._here = [n for n, key in enumerate(keys) if key in places]
        self._there = [places[keys[n]] for n in self._here]

    @property
    def compares(self) -> bool:
        """True if there is anything to compare: one process at stage 0 has one copy of all."""
        return bool(self._copies)

    @torch.no_grad()
    def difference(self) -> str | None:
        """Return None if all copies are equal; else, the same on every rank, which tensors differ,
        on which ranks. Waits for the device."""
        if not self.compares:
            return None
        if self._engine.switch is not None:
            self._engine.switch(True)
        self._own = {own.param: own for own in owned_slices(self._engine)}
        self._of_no_parameter = {
            f"{key} {kind}": checksum for key, _, kind, checksum in self._others()
        }
        values = torch.stack([self._value(copied) for copied in self._copies])
        self._add(values, self._summed)
        marks = self._marks(values)
        bad = self._bad(values, marks)
        if not any_rank(bool(bad.any()), self._device):
            return None
        return self._described(bad.nonzero().view(-1).tolist(), values, marks)

    def _all_copies(self) -> Iterator[Copied]:
        engine, stage = self._engine, self._engine.stage
        for param, name in engine.names.items():
            where = f"{name} {self._cuts(shard_of(param))}"
            kinds = [(WEIGHT, stage == 3)]
            if getattr(param, "ds_persist", False):
                kinds.append((GATHERED, False))
            if param in engine.trained:
                of_optimizer = [*([MAIN] if stage or self._has_main else []), *self._moments]
                kinds += [(kind, stage > 0) for kind in of_optimizer]
            for kind, summed in kinds:
                yield Copied(f"{where} {kind}", name, kind, param, summed)
        for key, name, kind, _ in self._others():
            yield Copied(f"{key} {kind}", name, kind)

    def _others(self) -> Iterator[tuple[str, str, str, list[Tensor]]]:
        """Return key, name and kind of state that belongs to no parameter, and its tensors."""
        engine = self._engine
        stage = f"pipeline {self._mesh.pipeline.rank}"
        names = list(engine.trained.values()) if engine.stage == 0 else None
        for number, holder in enumerate(holders(engine)):
            step = engine.optimizer.state.get(holder, {}).get("step", 0.0)
            of = names[number] if names else f"group {number}"
            count = step if isinstance(step, Tensor) else torch.tensor(float(step))
            yield f"{of} {number} {stage}", of, "count of updates", [count]
        scale = [float(value) for value in loss_scaler_state(engine).values()]
        yield "", "loss scale", "state", [torch.tensor(scale)]
        for number, (name, weight) in enumerate(engine.quantised):
            cuts = self._cuts(weight.shard)
            yield f"{name} {number} {stage} {cuts}", name, "weight in 4 bits", weight.tensors()
        for name, buffer in engine.buffers.items():
            yield f"{name} {stage}", name, "buffer", [buffer.values]
        if history := list(engine.kernels.state().values()):
            yield stage, "--fp8-recipe delayed", "history", history

    @property
    def _moments(self) -> tuple[str, ...]:
        return STATES[self._engine.config.optimizer.optimizer]

    def _cuts(self, shard: Shard) -> str:
        """Return the name of this rank's share of a parameter."""
        places = self._mesh.coordinates
        cuts = (f"{' x '.join(c.axes)} {c.of(places)[0] // c.copies}" for c in shard.cuts)
        return " ".join([shard.part, *cuts])

    def _value(self, copied: Copied) -> Tensor:
        """The checksum of this rank's copy, or of its part of it, on the engine's device."""
        total = torch.zeros((), dtype=torch.int64)
        if copied.param is None:
            tensors = self._of_no_parameter[copied.key]
            sums = [checksum(tensor).to(self._device) for tensor in tensors]
            total = checksum(torch.stack(sums)) if sums else total
        else:
            for values, start in self._parts(copied, copied.param):
                total = checksum(values, start)
        return total.to(self._device)

    def _parts(self, copied: Copied, param: nn.Parameter) -> Iterator[tuple[Tensor, int]]:
        """Return this rank's part of the flat values, and its start; nothing if it has none."""
        if copied.kind == GATHERED or (copied.kind == WEIGHT and self._engine.stage < 3):
            yield param.detach(), 0
        elif copied.kind == WEIGHT:
            start, end = partition_range(param, self._mesh.replicas(shard_of(param)))
            yield param.ds_tensor[: end - start], start  # type: ignore[attr-defined]
        else:
            own = self._own.get(param)
            kind = copied.kind if own is None or copied.kind != MAIN else own.trained
            if own is not None and kind in own.kinds:
                yield own.get(kind), own.slice.start

    def _of_model(self, own: OwnedSlice) -> Tensor:
        """The model's weights in the part that this rank updates."""
        if self._engine.stage == 3:
            return own.param.ds_tensor[: own.count]  # type: ignore[attr-defined]
        return own.param.detach().view(-1)[own.slice.start : own.slice.start + own.count]

    def _add(self, values: Tensor, among: Sequence[int]) -> None:
        """Adds the checksums of parts over the ranks that have them, in place."""
        places: dict[Group, list[int]] = {}
        for n in among:
            shard = shard_of(self._copies[n].param)  # type: ignore[arg-type]
            places.setdefault(self._mesh.replicas(shard), []).append(n)
        for group, here in places.items():
            if group.size > 1:
                sums = values[here]
                dist.all_reduce(sums, group=group.handle)
                values[here] = sums

    def _marks(self, values: Tensor) -> Tensor:
        """Return the checksums of the main weights, rounded as the model's, for each copy."""
        marks = torch.zeros_like(values)
        if not self._with_main:
            return marks
        mine, wanted = torch.zeros_like(values), torch.zeros_like(values)
        for n in self._with_main:
            own = self._own.get(self._copies[n].param)  # type: ignore[arg-type]
            if own is not None:
                start, rounded = own.slice.start, own.get(own.trained).to(own.param.dtype)
                alone = self._mesh.replicas(shard_of(own.param)).size == 1  # its part is all
                mine[n] = values[n] if alone else checksum(self._of_model(own), start)
                wanted[n] = checksum(rounded, start)
        marks += (mine != wanted) * OWN_DIFFERS
        if self._engine.stage > 0:
            self._add(wanted, self._with_main)
        differs = (values != wanted) * OTHERS_DIFFER
        marks[self._with_main] += differs[self._with_main]
        return marks

    def _bad(self, values: Tensor, marks: Tensor) -> Tensor:
        """Return which copies differ on any of the ranks that have them; bool [N], the same on
        those."""
        both = torch.stack([values, ~values, marks])
        replicas = self._mesh.group("data", "context")
        if replicas.size > 1:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=replicas.handle)
        if self._sharded.size > 1 and self._common:
            least = torch.iinfo(torch.int64).min
            table = torch.full((3, self._common), least, device=self._device)
            table[:, self._there] = both[:, self._here]
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._sharded.handle)
            both[:, self._here] = table[:, self._there]
        return (both[0] != ~both[1]) | (both[2] > 0)

    def _described(self, bad: Sequence[int], values: Tensor, marks: Tensor) -> str:
        world, host = self._mesh.world.rank, socket.gethostname()
        copies = {self._copies[n].key: self._copies[n] for n in bad}
        own = {
            (self._copies[n].name, self._copies[n].kind, self._copies[n].key): Holder(
                world, host, int(values[n]), int(marks[n])
            )
            for n in bad
        }
        held: dict[tuple[str, str, str], list[Holder]] = {}
        for found in self._mesh.world.gathered(own):
            for what, holder in found.items():
                held.setdefault(what, []).append(holder)
        partitioned = self._engine.stage == 3
        verdicts = [
            (ReplicaVerdict.of(holders, partitioned), *what) for what, holders in held.items()
        ]
        # Where the weights of the model differ, main weights that differ too are no news.
        weights = {name for _, name, kind, _ in verdicts if kind == WEIGHT}
        verdicts = [each for each in verdicts if each[2] != MAIN or each[1] not in weights]
        verdicts.sort(key=lambda each: not each[0].sure)
        said = []
        for verdict, name, kind, key in verdicts[:_SHOWN]:
            said.append(f"{name} ({kind}): {self._in_words(verdict, copies.get(key))}")
        if len(verdicts) > _SHOWN:
            said.append(f"{len(verdicts) - _SHOWN:,} more differ")
        return "; ".join(said)

    def _in_words(self, verdict: ReplicaVerdict, copied: Copied | None) -> str:
        """A tensor that differs; every rank must call it, with None if it has no copy."""
        rank, wrong = self._mesh.world.rank, verdict.wrong[0].rank
        place: tuple[str, int] | None = None
        if verdict.of_main:
            if rank == wrong and copied is not None and copied.param is not None:
                own = self._own[copied.param]
                main = own.get(own.trained).to(own.param.dtype)
                place = _compared(self._of_model(own), main, own.param, own.slice.start)
        else:
            whole = None if copied is None or copied.param is None else self._whole(copied)
            right = verdict.right[0].rank
            other = self._mesh.world.shared(None if whole is None else whole.cpu(), right)
            if rank == wrong and whole is not None and copied is not None:
                place = _compared(whole.cpu(), other, copied.param, 0)
        place = self._mesh.world.shared(place, wrong)
        if place is None:
            return verdict.words("")
        words, first = place
        if not verdict.of_main and copied is not None and copied.summed:
            part = self._own.get(copied.param)  # type: ignore[arg-type]
            has = part is not None and part.slice.start <= first < part.slice.start + part.count
        else:
            has = True
        having = [n for n, owns in enumerate(self._mesh.world.gathered(has)) if owns]
        return verdict.among(having).words(words)

    def _whole(self, copied: Copied) -> Tensor:
        """All values of a copy, flat; all of its replicas must call it."""
        assert copied.param is not None
        parts = list(self._parts(copied, copied.param))
        if not copied.summed:
            return parts[0][0].reshape(-1)
        dtype = copied.param.dtype if copied.kind == WEIGHT else torch.float32
        count = shard_of(copied.param).local_shape(self._mesh.coordinates)
        whole = torch.zeros(count, dtype=dtype, device=self._device).view(-1)
        for values, start in parts:
            whole[start : start + values.numel()] = values.view(-1)
        replicas = self._mesh.replicas(shard_of(copied.param))
        if replicas.size > 1:
            # As bits of 32: NCCL adds no 16-bit integers, and NaN must stay what it is.
            bits = bits_of(whole).int()
            dist.all_reduce(bits, group=replicas.handle)
            whole = bits.to(bits_of(whole).dtype).view(dtype)
        return whole


def _compared(
    mine: Tensor, other: Tensor, param: nn.Parameter | None, start: int
) -> tuple[str, int]:
    """Return text with the number of differing elements and the place of the first."""
    differ = (bits_of(mine) != bits_of(other.to(mine.device))).nonzero().view(-1)
    first = int(differ[0]) if len(differ) else 0
    place: tuple[int, ...] = (start + first,)
    if param is not None:
        shape = param.ds_shape if hasattr(param, "ds_shape") else param.shape
        place = tuple(int(n) for n in torch.unravel_index(torch.tensor(start + first), shape))
    here, there = float(mine.view(-1)[first]), float(other.view(-1)[first])
    words = (
        f"in {len(differ):,} of {mine.numel():,} elements, the first at {list(place)}: "
        f"{here:g} instead of {there:g}"
    )
    return words, start + first


class ReplicaCheck(Callback):
    """Compares replicas before every save, and after every ``interval`` steps; never with 0."""

    def __init__(
        self,
        engine: TrainEngine,
        interval: int | None = None,
        newest: Callable[[], str] = lambda: "there is no earlier checkpoint",
    ) -> None:
        self._engine, self._interval, self._newest = engine, interval, newest
        self._replicas: Replicas | None = None
        self._equal_after: int | None = None

    def between_steps(self, trainer: Trainer) -> None:
        """Compares if it is due."""
        if self._interval and trainer.iteration % self._interval == 0:
            trainer.settle()  # a step that was not finite is named first
            self.check(trainer.iteration)

    def went_back(self, trainer: Trainer) -> None:
        self._equal_after = None

    def check(self, iteration: int) -> None:
        """Raises FaultError, on every rank, if copies differ after this many steps; once each."""
        if self._interval == 0 or self._equal_after == iteration:
            return
        if self._replicas is None:
            self._replicas = Replicas(self._engine)
        difference = self._replicas.difference()
        if difference is not None:
            raise FaultError(
                f"after iteration {iteration} what several ranks have copies of differs: "
                f"{difference}; a processor or its memory has changed numbers, or ranks have not "
                f"computed the same: {self._newest()}, and this state is not saved; if it comes "
                "again on the same machine, leave that out"
            )
        self._equal_after = iteration
