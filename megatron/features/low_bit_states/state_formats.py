"""Storage of the optimizer's states in fewer than 32 bits, and stochastic rounding.

All of it is elementwise arithmetic, of 8 bits over blocks of neighbours, which torch.compile fuses.
Values are float32 in between. Except where it is exact, an update rounds stochastically, to one of
the two neighbours with the probabilities that make the expected value exact: with ``--adam-beta2
0.999`` a second moment changes by less than half a unit in the last place of bfloat16 in a step,
and rounded to nearest it would never fall. Without random bits values are rounded to nearest, which
leaves stored values as they are: a checkpoint has their float32 values, and a resumed run the same
bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.layouts import StateDtypes
from megatron.engine.update.adam import BLOCK

_HALF, _NAN = 0x8000, 0x7FC00000
_ONE = 0x3F800000
"""1.0 in float32."""
_STEP_BITS = 20
"""Bits of float32 that an 8-bit code leaves out: it keeps 3 of the mantissa."""
_SMALLEST = 2.0**-90
"""Blocks whose largest moment is smaller become 0, so that no code means a subnormal number. Next
to Adam's epsilon neither the first nor the root of the second moment matters there."""


class Stored(ABC):
    """A format of moments."""

    @abstractmethod
    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        """Storage of that many zeros."""

    @abstractmethod
    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """The float32 values."""

    @abstractmethod
    def encode(self, values: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        """Float32 values as they are stored: rounded stochastically by ``random`` (int32 of their
        shape, all bits random), to nearest without it."""

    @property
    @abstractmethod
    def bytes(self) -> float:
        """Bytes per element."""


class Float32Moments(Stored):
    """As it is."""

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
    """8 bits an element and a float32 scale, the largest magnitude, per block. Values and codes are
    [blocks, BLOCK], of the last block alone [1, its length]; scales [blocks].

    A code is the leading bits of the ratio to the scale, as a float of 3 mantissa bits: magnitudes
    over 16 powers of two with a sign, over 32 without one. That is the range of Adam's first moment
    and of the square root of its second. 0 means 0.
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
            # A second moment that became 0 would make the step of its weight huge.
            codes = torch.where(values > 0, codes.clamp(min=1), 0)
        codes = torch.where((scales == 0)[:, None], 0, codes)
        return codes.to(self._dtype), scales


class MainWeights(ABC):
    """A format of the weights that are updated; ``weight`` is the model's own, in bfloat16."""

    @abstractmethod
    def zeros(self, numel: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the zeros that are stored next to n weights."""

    @abstractmethod
    def decode(self, weight: Tensor, stored: tuple[Tensor, ...]) -> Tensor:
        """The float32 values."""

    @abstractmethod
    def encode(
        self, values: Tensor, random: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``weight`` and what is stored next to it, of float32 values; ``random`` as for
        moments."""

    @property
    @abstractmethod
    def bytes(self) -> float:
        """Bytes per element next to the model's weights."""


class Remainder(MainWeights):
    """Exact float32 weights: the model's and the 16 bits that they lack.

    The remainder is the difference of the bit patterns, from -0x8000 to 0x7fff, so weights are
    rounded to nearest, away from 0 where they are halfway. To even, 65,537 float32 numbers would
    round to the same weight, one more than 16 bits tell apart.
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
        # Rounded up, some NaNs would become zeros.
        bits = torch.where(values.isnan(), _NAN, values.view(torch.int32))
        upper = (bits + _HALF) >> 16
        remainder = bits - (upper << 16)
        return upper.to(torch.int16).view(torch.bfloat16), (remainder.to(torch.int16),)


class Rounded(MainWeights):
    """The model's weights alone."""

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
    """Formats of the states of Adam."""

    main: MainWeights
    exp_avg: Stored
    exp_avg_sq: Stored

    @property
    def bytes(self) -> float:
        """Bytes per parameter, next to the model's weights."""
        return self.main.bytes + self.exp_avg.bytes + self.exp_avg_sq.bytes


def state_formats(dtypes: StateDtypes) -> StateFormats:
    """The formats of the flags' dtypes."""
    main = {"fp32": Remainder, "bf16": Rounded}[dtypes.main_params]()
    moments = [
        Blockwise(signed)
        if dtype == "int8"
        else {"fp32": Float32Moments, "bf16": BFloat16}[dtype]()
        for dtype, signed in ((dtypes.exp_avg, True), (dtypes.exp_avg_sq, False))
    ]
    return StateFormats(main, *moments)


def to_bfloat16(values: Tensor, random: Tensor | None = None) -> Tensor:
    """Float32 values in bfloat16, rounded stochastically by the upper half of ``random`` (int32 of
    their shape), or to nearest even."""
    if random is None:
        return values.to(torch.bfloat16)
    added = values.view(torch.int32) + ((random >> 16) & 0xFFFF)
    upper = (added >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), torch.nan, upper)
