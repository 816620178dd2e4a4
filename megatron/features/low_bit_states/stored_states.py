"""Optimizer states of ``--use-precision-aware-optimizer`` at ZeRO stages 1 and 2: storage in fewer
than 32 bits, and stochastic rounding.

The optimizer updates the rank's partition of the model's own bf16 weights, which is also the key of
the other states in ``optimizer.state``. A state is one or two tensors, with a value per element or
per :data:`~megatron.engine.update.adam.BLOCK` elements of the partition.

All computation is elementwise, with 8 bits over blocks of neighbouring elements, and is fused by
torch.compile. Intermediate values are float32. Unless it is exact, an update rounds stochastically:
to one of the two neighbouring values, with probabilities that make the expected value exact. With
``--adam-beta2 0.999`` a second moment changes by less than half a unit in the last place of
bfloat16 per step, so that rounding to nearest would never let it decrease. Without random bits,
values are rounded to nearest. This leaves stored values unchanged: a checkpoint contains them in
float32, and a resumed run restores the same bits.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.layouts import StateDtypes
from megatron.engine.update.adam import BLOCK, Arranged, Decoded
from megatron.engine.update.partition_update import wrapped
from megatron.kernels.compiler import missing_compiler
from megatron.parallel.mesh import Coordinates
from megatron.parallel.shard import Shard, shard_of

_HALF, _NAN = 0x8000, 0x7FC00000
_ONE = 0x3F800000
"""Bit pattern of 1.0 in float32."""
_STEP_BITS = 20
"""Number of low float32 bits that an 8-bit code drops; it keeps 3 mantissa bits."""
_SMALLEST = 2.0**-90
"""Blocks whose largest moment is below this are stored as 0, so that no code represents a subnormal
number. Such first moments, and roots of second moments, are far below Adam's epsilon."""


class Stored(ABC):
    """Format in which moments are stored."""

    @abstractmethod
    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return tensors that store ``numel`` zeros."""

    @abstractmethod
    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Return the stored values in float32."""

    @abstractmethod
    def encode(self, values: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        """Round float32 values for storage: stochastically with ``random`` (int32 of the same
        shape, all bits random), or to nearest without it."""

    @property
    @abstractmethod
    def bytes(self) -> float:
        """Bytes per element."""


class Float32Moments(Stored):
    """Moments stored unchanged."""

    bytes = 4.0

    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(numel, device=device),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0]

    def encode(self, values: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        return (values,)


class BFloat16(Stored):
    bytes = 2.0

    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(numel, dtype=torch.bfloat16, device=device),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0].float()

    def encode(self, values: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        return (to_bfloat16(values, random),)


class Blockwise(Stored):
    """Format with an 8-bit code per element, and per block a float32 scale, its largest magnitude.
    Values and codes are [blocks, BLOCK], or [1, length] for the last block alone; scales are
    [blocks].

    A code consists of the leading bits of the ratio of a value to its scale, as a float with 3
    mantissa bits. Magnitudes cover 16 powers of two with a sign, and 32 without one. That is the
    range of Adam's first moment, and of the square root of its second. Code 0 means 0.
    """

    bytes = 1 + 4 / BLOCK

    def __init__(self, signed: bool) -> None:
        self._signed = signed
        self._dtype = torch.int8 if signed else torch.uint8
        self._codes = 127 if signed else 255
        self._base = _ONE - (self._codes << _STEP_BITS)

    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        codes = torch.zeros(numel, dtype=self._dtype, device=device)
        return codes, torch.zeros(-(-numel // BLOCK), device=device)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scales = stored
        wide = codes.int()
        ratio = (self._base + (wide.abs() << _STEP_BITS)).view(torch.float32)
        ratio = torch.where(wide == 0, 0.0, ratio)
        if self._signed:
            ratio = torch.where(wide < 0, -ratio, ratio)
        return ratio * scales[:, None]

    def encode(self, values: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        scales = values.abs().amax(1)
        scales = torch.where(scales < _SMALLEST, 0.0, scales)
        ratios = values.abs() / torch.where(scales == 0, 1.0, scales)[:, None]
        distance = ratios.view(torch.int32) - self._base
        noise = 1 << (_STEP_BITS - 1) if random is None else random & ((1 << _STEP_BITS) - 1)
        codes = ((distance + noise) >> _STEP_BITS).clamp(0, self._codes)
        if self._signed:
            codes = torch.where(values < 0, -codes, codes)
        else:
            # A second moment rounded to 0 would make the update of its weight huge.
            codes = torch.where(values > 0, codes.clamp(min=1), 0)
        codes = torch.where((scales == 0)[:, None], 0, codes)
        return codes.to(self._dtype), scales


class MainWeights(ABC):
    """Format in which main weights are stored. ``weight`` is the model's own bfloat16 weight."""

    @abstractmethod
    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the initial tensors that are stored in addition to ``numel`` model weights."""

    @abstractmethod
    def decode(self, weight: Tensor, stored: tuple[Tensor, ...]) -> Tensor:
        """Return the main weights in float32."""

    @abstractmethod
    def encode(
        self, values: Tensor, random: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Round float32 main weights. Return ``weight`` and the additional tensors to store. For
        ``random`` see :meth:`Stored.encode`."""

    @property
    @abstractmethod
    def bytes(self) -> float:
        """Bytes per element, in addition to the model's weights."""


class Remainder(MainWeights):
    """Exact float32 weights: the model's weights, and the 16 bits that they lack.

    The remainder is the difference between the bit patterns, from -0x8000 to 0x7fff. Weights are
    therefore rounded to nearest with ties away from 0. With ties to even, 65,537 float32 numbers
    would round to the same weight, one more than 16 bits can distinguish.
    """

    bytes = 2.0

    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(numel, dtype=torch.int16, device=device),)

    def decode(self, weight: Tensor, stored: tuple[Tensor, ...]) -> Tensor:
        upper = weight.view(torch.int16).int() << 16
        return (upper + stored[0].int()).view(torch.float32)

    def encode(
        self, values: Tensor, random: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        # Rounding up would turn some NaNs into zeros.
        bits = torch.where(values.isnan(), _NAN, values.view(torch.int32))
        upper = (bits + _HALF) >> 16
        remainder = bits - (upper << 16)
        return upper.to(torch.int16).view(torch.bfloat16), (remainder.to(torch.int16),)


class Rounded(MainWeights):
    """Main weights that are the model's own weights; nothing else is stored."""

    bytes = 0.0

    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        return ()

    def decode(self, weight: Tensor, stored: tuple[Tensor, ...]) -> Tensor:
        return weight.float()

    def encode(
        self, values: Tensor, random: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return to_bfloat16(values, random), ()


class StateFormats(NamedTuple):
    """Storage formats of Adam's main weights and moments."""

    main: MainWeights
    exp_avg: Stored
    exp_avg_sq: Stored

    @property
    def bytes(self) -> float:
        """Bytes per parameter, in addition to the model's weights."""
        return self.main.bytes + self.exp_avg.bytes + self.exp_avg_sq.bytes


def state_formats(dtypes: StateDtypes) -> StateFormats:
    """Return the storage formats for the dtypes that the flags select."""
    main = {"fp32": Remainder, "bf16": Rounded}[dtypes.main_params]()
    moments = [
        Blockwise(signed)
        if dtype == "int8"
        else {"fp32": Float32Moments, "bf16": BFloat16}[dtype]()
        for dtype, signed in ((dtypes.exp_avg, True), (dtypes.exp_avg_sq, False))
    ]
    return StateFormats(main, *moments)


def to_bfloat16(values: Tensor, random: Tensor | None = None) -> Tensor:
    """Round float32 values to bfloat16: stochastically, by the upper half of ``random`` (int32 of
    the same shape), or without ``random`` to nearest even."""
    if random is None:
        return values.to(torch.bfloat16)
    added = values.view(torch.int32) + ((random >> 16) & 0xFFFF)
    upper = (added >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), torch.nan, upper)


_NAMES = {
    "weight": ("remainder",),
    "exp_avg": ("exp_avg", "exp_avg_scale"),
    "exp_avg_sq": ("exp_avg_sq", "exp_avg_sq_scale"),
}
"""Names in ``optimizer.state`` of each state's tensors. A format may use only the first."""


class StoredStates:
    """A :class:`~megatron.engine.update.adam.StateFormat` with fewer than 32 bits."""

    def __init__(self, dtypes: StateDtypes, keys: Mapping[nn.Parameter, int] | None = None) -> None:
        self.keys = keys
        self._main, *moments = state_formats(dtypes)
        self._moments = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        nothing = torch.device("meta")
        counts = {"weight": len(self._main.zeros(0, nothing))}
        counts |= {kind: len(form.zeros(0, nothing)) for kind, form in self._moments.items()}
        self._names = {kind: _NAMES[kind][:count] for kind, count in counts.items()}
        self._scaled = any(len(names) > 1 for names in self._names.values())

    def create(self, main: Tensor) -> dict[str, Tensor]:
        states: dict[str, Tensor] = {}
        for kind, form in self._moments.items():
            zeros = form.zeros(main.numel(), main.device)
            states |= zip(self._names[kind], zeros, strict=True)
        return states

    def take_main_weights(self, wrapper: Any, optimizer: torch.optim.Optimizer) -> None:
        """Make DeepSpeed's optimizer ``wrapper`` of stage 1 or 2, around ``optimizer``, update the
        model's own weights: in each group this process's part. Frees the wrapper's
        float32 copy of the weights."""
        for number, group in enumerate(optimizer.param_groups):
            model = wrapper.own_part(number)
            optimizer.state.pop(wrapper.single_partition_of_fp32_groups[number], None)
            wrapper.single_partition_of_fp32_groups[number] = model
            group["params"] = [model]
            rest = self._main.zeros(model.numel(), model.device)
            optimizer.state[model] = dict(zip(self._names["weight"], rest, strict=True))
            for param in wrapper.bit16_groups[number]:
                param._hp_mapping = None  # drops views that would keep the float32 copy alive

    def tensors(
        self, model: Tensor, main: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        return model, *(state[name] for names in self._names.values() for name in names)

    def arrange(self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> Arranged:
        """Reshape an update's tensors to [blocks, BLOCK] if there are scales, or to [1, n] for the
        last block alone."""
        if not self._scaled:
            return grad, elements, stored
        shape = (-1, min(BLOCK, grad.numel()))
        names = ("model", *(name for names in self._names.values() for name in names))
        views = tuple(
            tensor if name.endswith("_scale") else tensor.view(shape)
            for name, tensor in zip(names, stored, strict=True)
        )
        return grad.view(shape), elements.view(shape) if elements.dim() else elements, views

    def decode(self, stored: tuple[Tensor, ...]) -> Decoded:
        # This comparison makes compiled code treat the block length as a constant.
        if self._scaled and stored[0].shape[1] != BLOCK and stored[0].shape[0] != 1:
            raise AssertionError(stored[0].shape)
        weight, rest, exp_avg, exp_avg_sq = self._split(stored)
        return Decoded(
            self._main.decode(weight, rest),
            self._moments["exp_avg"].decode(exp_avg),
            self._moments["exp_avg_sq"].decode(exp_avg_sq),
        )

    def encode(
        self, stored: tuple[Tensor, ...], new: Decoded, held: Tensor, elements: Tensor, step: Tensor
    ) -> None:
        if elements.dim() == 0:
            count = new.weight.numel()
            places = torch.arange(count, dtype=torch.int32, device=elements.device)
            elements = places.view(new.weight.shape) + elements
        bits = self.bits(elements, step)
        weight, rest = self._main.encode(new.weight, bits.weight)
        exp_avg = self._moments["exp_avg"].encode(new.exp_avg, bits.exp_avg)
        exp_avg_sq = self._moments["exp_avg_sq"].encode(new.exp_avg_sq, bits.exp_avg_sq)
        for old, found in zip(stored, (weight, *rest, *exp_avg, *exp_avg_sq), strict=True):
            old.copy_(torch.where(held, old, found))

    def bits(self, elements: Tensor, step: Tensor) -> Decoded:
        """Return random bits for each state of the given elements in an update."""
        first = random_bits(elements, step.int())
        second = more_bits(first)
        return Decoded(more_bits(second), second, first)

    def _split(
        self, stored: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        parts, place = [], 1
        for names in self._names.values():
            parts.append(stored[place : place + len(names)])
            place += len(names)
        return stored[0], *parts  # type: ignore[return-value]

    def model_weights(self, values: Tensor) -> Tensor:
        """Return float32 weights as stored in the model."""
        return self._main.encode(values)[0]

    def partition(self, main: Tensor, state: Mapping[str, Tensor]) -> StoredPartition:
        """Return float32 access to the partition ``main`` and its states in ``optimizer.state``."""
        return StoredPartition(self, main.detach(), state)


class StoredPartition:
    """Float32 access to a partition's stored states, by element range."""

    def __init__(self, form: StoredStates, model: Tensor, state: Mapping[str, Tensor]) -> None:
        self._form, self._model, self._state = form, model, state
        self._edges: dict[tuple[str, int], Tensor] = {}

    def has(self, kind: str) -> bool:
        """Return whether this state exists. Moments do not exist before the first update."""
        return kind == "weight" or kind in self._state

    def get(self, kind: str, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of a state as a new float32 tensor."""
        form = self._form
        names = form._names[kind]
        if kind == "weight":
            rest = tuple(self._state[name].narrow(0, start, count) for name in names)
            return form._main.decode(self._model.narrow(0, start, count), rest)
        first, end = start // BLOCK * BLOCK, start + count
        parts = [
            form._moments[kind].decode(
                tuple(self._blocks(self._state[name], *part) for name in names)
            )
            for part in self._whole_and_last(first, end)
        ]
        values = torch.cat([part.view(-1) for part in parts])
        return values[start - first : end - first]

    def set(self, kind: str, start: int, values: Tensor) -> None:
        """Write elements from ``start`` on, rounded to nearest. Neighbouring ranges may share a
        block, whose scale is correct once this object has written all of them."""
        form, count = self._form, values.numel()
        values = values.to(self._model.device, torch.float32)
        names = form._names[kind]
        if kind == "weight":
            weight, rest = form._main.encode(values)
            self._model.narrow(0, start, count).copy_(weight)
            for name, found in zip(names, rest, strict=True):
                self._state[name].narrow(0, start, count).copy_(found)
            return
        inner, last = -(-start // BLOCK) * BLOCK, (start + count) // BLOCK * BLOCK
        edges = {start // BLOCK} if inner > start else set()
        if start + count > last:
            edges.add(last // BLOCK)
        for block in edges:
            self._write(kind, block * BLOCK, self._edge(kind, block, start, values))
        if inner < last:
            self._write(kind, inner, values[inner - start : last - start])

    def _edge(self, kind: str, block: int, start: int, values: Tensor) -> Tensor:
        """Return a block, in float32, with ``values`` inserted at element ``start``."""
        first = block * BLOCK
        end = min(first + BLOCK, self._model.numel())
        kept = self._edges.get((kind, block))
        if kept is None:
            kept = self._edges[kind, block] = self.get(kind, first, end - first)
        low, high = max(first, start), min(end, start + values.numel())
        kept[low - first : high - first] = values[low - start : high - start]
        return kept

    def _write(self, kind: str, first: int, values: Tensor) -> None:
        """Write complete blocks from element ``first`` on."""
        form, names = self._form._moments[kind], self._form._names[kind]
        for begin, end in self._whole_and_last(first, first + values.numel()):
            part = values[begin - first : end - first]
            stored = form.encode(part.view(-1, min(BLOCK, end - begin)))
            for name, encoded in zip(names, stored, strict=True):
                self._blocks(self._state[name], begin, end).copy_(encoded)

    def _whole_and_last(self, first: int, end: int) -> list[tuple[int, int]]:
        """Split elements [first, end) into up to two ranges: whole blocks of BLOCK elements, and
        the partition's shorter last block. ``first`` must be the start of a block."""
        total = self._model.numel()
        end = min(-(-end // BLOCK) * BLOCK, total)
        whole = end // BLOCK * BLOCK
        return [part for part in ((first, whole), (whole, end)) if part[0] < part[1]]

    def _blocks(self, tensor: Tensor, first: int, end: int) -> Tensor:
        """Return a range from :meth:`_whole_and_last`, shaped as by
        :meth:`StoredStates.arrange`."""
        if tensor.numel() == self._model.numel():
            return tensor[first:end].view(-1, min(BLOCK, end - first))
        return tensor[first // BLOCK : -(-end // BLOCK)]


_MULTIPLIERS = (0x7FEB352D, -0x7B935975)
"""Multipliers of the hash function "lowbias32" as int32; the second is 0x846ca68b."""
_GOLDEN = -0x61C8864F
"""2**32 divided by the golden ratio, as int32."""


def key_of(seed: int, name: str, shard: Shard, coordinates: Coordinates) -> int:
    """Return the int32 identifier, for :func:`random_bits`, of the first element in a rank's shard
    of a parameter."""
    words = f"{seed} {name} {sorted(shard.ranges(coordinates).items())}"
    return wrapped(zlib.crc32(words.encode()))


def keys_of(
    trained: Mapping[nn.Parameter, str], seed: int, coordinates: Coordinates
) -> dict[nn.Parameter, int]:
    """Return the :func:`key_of` each parameter that is trained, whose names are the values."""
    return {p: key_of(seed, name, shard_of(p), coordinates) for p, name in trained.items()}


def random_bits(elements: Tensor, step: Tensor) -> Tensor:
    """Return 32 random bits for each element of an update.

    Args:
        elements: identifiers, int32 [numel]: each is a shard's key plus the element's index.
        step: number of the update, an int32 scalar.
    """
    first, second = _MULTIPLIERS
    counted = _folded(step * _GOLDEN, 16) * second
    bits = _folded(elements, 16) * first
    return _folded(_folded(bits ^ counted, 15) * second, 16)


def more_bits(bits: Tensor) -> Tensor:
    """Derive another set of random bits from the bits of the same elements."""
    return _folded((bits ^ _GOLDEN) * _MULTIPLIERS[0], 15)


def _folded(bits: Tensor, shift: int) -> Tensor:
    """Return ``bits ^ (bits >> shift)``, with a logical shift."""
    return bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))


def states_line(states: StateDtypes, device: torch.device) -> str:
    """Return a line about the storage of the optimizer's states, and the reason if a GPU updates
    them slowly."""
    missing = missing_compiler(device.type) if device.type == "cuda" else None
    slow = f"; {missing}, so that the update is many operations, slower than of float32 states"
    return f"optimizer states: {states.shown}" + (slow if missing else "")
