"""Bitwise comparison of the state that several ranks have copies of, to find a faulty rank.

The mesh, each parameter's ``Shard`` and the ZeRO stage determine which ranks have copies: model
weights are replicated over data-parallel ranks (stages 0 to 2), unsharded parameters over
tensor-parallel ranks, and tied layers over pipeline stages; so is the optimizer state of all these.
Main weights are a copy too: rounded to the model's dtype, they equal its weights. A comparison
reads every copy once and exchanges 24 bytes for each.
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

_SHOWN = 3  # maximum number of differing tensors described in a message


OTHERS_DIFFER, OWN_DIFFERS = 1, 2
"""Bits of ``Holder.mark``: the rank's weights differ from the main weights of all ranks, rounded to
the model's dtype, or from its own."""


@dataclass(frozen=True)
class Holder:
    """Rank that has a copy of a state. ``value`` is the copy's checksum, and ``mark`` the result of
    the comparison with the main weights."""

    rank: int
    host: str
    value: int
    mark: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class ReplicaVerdict:
    """Ranks that have a wrong copy of a state.

    Attributes:
        wrong: holders of wrong copies, ordered by rank.
        right: holders of the correct copies. Empty if a rank's weights differ from its own main
            weights, although all ranks have the same weights.
        sure: False if the ranks in ``right`` may be the wrong ones, for example with two copies.
    """

    wrong: tuple[Holder, ...]
    right: tuple[Holder, ...]
    sure: bool = True

    @classmethod
    def of(cls, holders: Sequence[Holder], partitioned: bool) -> ReplicaVerdict:
        """Judge by the main weights if any holder is marked, else by the majority. ``partitioned``
        means that checksums are sums over ranks (ZeRO stage 3), so a mark concerns all of them."""
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
        """True if a rank's weights differ from its own main weights."""
        return not self.right

    def among(self, ranks: Collection[int]) -> ReplicaVerdict:
        """Return the verdict restricted to ``ranks``. If that would remove all wrong ranks or all
        right ranks, they are kept."""
        wrong = tuple(holder for holder in self.wrong if holder.rank in ranks)
        right = tuple(holder for holder in self.right if holder.rank in ranks)
        return replace(self, wrong=wrong or self.wrong, right=right or self.right)

    def words(self, how: str) -> str:
        """Describe which ranks differ from which; ``how`` says in what they differ."""
        wrong, right = joined(self.wrong), joined(self.right)
        verb = "differs" if len(self.wrong) == 1 else "differ"
        how = f" {how}" if how else ""
        if self.of_main:
            return f"on {wrong} the model's weights are not its main weights{how}"
        unsure = "" if self.sure else "; no majority has one of them, so either may be wrong"
        return f"{wrong} {verb} from {right}{how}{unsure}"


def joined(holders: Sequence[Holder]) -> str:
    """Return the ranks and their hosts as a list in prose: "a, b and c"."""
    *first, last = map(str, holders) if holders else [""]
    return f"{', '.join(first)} and {last}" if first else last


@dataclass(frozen=True)
class Copied:
    """State that must be identical on all ranks with the same ``key``: the ``kind`` of state of the
    parameter ``param``, or of the run if ``param`` is None. If ``summed``, the state is partitioned
    across data-parallel ranks, and their checksums are added."""

    key: str
    name: str
    kind: str
    param: nn.Parameter | None = None
    summed: bool = False


class Replicas:
    """Comparison of the replicated state of an engine. Collective: every rank must create one, and
    call :meth:`difference` at the same step."""

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
        """State to compare. State that only one rank has is left out."""
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
        """True if anything can be compared. One process at ZeRO stage 0 has no replicated state."""
        return bool(self._copies)

    @torch.no_grad()
    def difference(self) -> str | None:
        """Describe the tensors and ranks that differ, or return None if all copies are equal.
        The result is the same on every rank. Collective and synchronizing: every rank must call
        this."""
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
        """Yield the key, name, kind and tensors of each state that belongs to no parameter."""
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
        """Return a string that identifies this rank's shard of a parameter."""
        places = self._mesh.coordinates
        cuts = (f"{' x '.join(c.axes)} {c.of(places)[0] // c.copies}" for c in shard.cuts)
        return " ".join([shard.part, *cuts])

    def _value(self, copied: Copied) -> Tensor:
        """Return the checksum of this rank's copy, or partition of it, on the engine's device."""
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
        """Yield this rank's partition of the flat values and the offset of its first element.
        Yields nothing if the rank has no partition."""
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
        """Return the model's weights in the slice that this rank updates."""
        if self._engine.stage == 3:
            return own.param.ds_tensor[: own.count]  # type: ignore[attr-defined]
        return own.param.detach().view(-1)[own.slice.start : own.slice.start + own.count]

    def _add(self, values: Tensor, among: Sequence[int]) -> None:
        """Sum the checksums with indices ``among`` over the ranks with partitions, in place."""
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
        """Return the mark of each copy, int64 [N]: the result of comparing the checksum of the
        weights with the checksum of the main weights, rounded to the model's dtype."""
        marks = torch.zeros_like(values)
        if not self._with_main:
            return marks
        mine, wanted = torch.zeros_like(values), torch.zeros_like(values)
        for n in self._with_main:
            own = self._own.get(self._copies[n].param)  # type: ignore[arg-type]
            if own is not None:
                start, rounded = own.slice.start, own.get(own.trained).to(own.param.dtype)
                # True if this rank updates the whole parameter
                alone = self._mesh.replicas(shard_of(own.param)).size == 1
                mine[n] = values[n] if alone else checksum(self._of_model(own), start)
                wanted[n] = checksum(rounded, start)
        marks += (mine != wanted) * OWN_DIFFERS
        if self._engine.stage > 0:
            self._add(wanted, self._with_main)
        differs = (values != wanted) * OTHERS_DIFFER
        marks[self._with_main] += differs[self._with_main]
        return marks

    def _bad(self, values: Tensor, marks: Tensor) -> Tensor:
        """Return a mask of the copies that differ on any rank that has them, bool [N]. It is the
        same on all of these ranks."""
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
        # If the model weights of a parameter differ, a message about its main weights adds nothing.
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
        """Describe a tensor that differs. Collective: every rank must call this. ``copied`` is None
        on ranks without a copy."""
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
        """Return all values of a copy, flat. Collective: all ranks that share it must call this."""
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
            # Reduce bit patterns as int32: NCCL has no 16-bit integers, and NaN must keep its bits.
            bits = bits_of(whole).int()
            dist.all_reduce(bits, group=replicas.handle)
            whole = bits.to(bits_of(whole).dtype).view(dtype)
        return whole


def _compared(
    mine: Tensor, other: Tensor, param: nn.Parameter | None, start: int
) -> tuple[str, int]:
    """Describe the differing elements, and return the flat index of the first one as well."""
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
    """Callback that compares replicas before every save, and after every ``interval`` steps. None
    compares only before saves; 0 disables all comparisons."""

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
        """Compare the replicas if the interval has passed."""
        if self._interval and trainer.iteration % self._interval == 0:
            trainer.settle()  # so that a non-finite step is reported first
            self.check(trainer.iteration)

    def went_back(self, trainer: Trainer) -> None:
        self._equal_after = None

    def check(self, iteration: int) -> None:
        """Compare the copies once per iteration. Raises FaultError on all ranks if they differ."""
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
