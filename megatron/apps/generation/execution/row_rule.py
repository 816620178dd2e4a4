"""Row counts and weight layouts with which a row's results do not depend on the other rows.

On CPUs a row of a GEMM usually has the same bits in every product of four or more rows, or of eight
where several threads share it. This is tried with the model's own shapes; where it fails, all
products have one number of rows. On other devices nothing is promised.

Float32 weights on CPUs are packed in the layout of oneDNN's kernels: products of few rows take half
the time, and differ from others by rounding. Evaluations read the plain weights.

Shapes: M rows of a product, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.mesh import Group

_FEWEST = 4
_SOME = (_FEWEST, 8, 12, 16, 24)  # that are tried as the fewest rows
_TILE = 32
_TRIED = (4, 5, 7, 8, 13, 16, 31, 33, 64)
_SHARED = (9, 10, 11, 12, 17, 18, 19, 25)  # whose last rows may be a thread's only ones
_OUTPUTS = 4096  # of a product that is tried
# Bytes that elementwise kernels of CPUs take at a time; other code computes the rest of a tensor.
_VECTOR = 128
SMALL_PRODUCT = 16**3
"""Multiplications up to which torch computes 16-bit products on CPUs by other code. The results
differ too seldom to be tried."""
# Numbers of a tensor for each thread at least: elementwise kernels divide larger ones.
_GRAIN = 2**15
LEAST = 2**18  # numbers of a packed weight: calling this kernel takes longer than others
SHARE = 0.25  # of the free memory for packed weights; none is packed if they need more
_ROWS = 64  # for which the layout is chosen


@dataclass(frozen=True)
class RowRule:
    """The rows of a pass: ``fewest`` to ``most`` (None for any number), and ``spare`` added ones,
    so that the last row is never in use. Threads get whole vectors of tensors with these
    ``widths``."""

    fewest: int = _FEWEST
    most: int | None = None
    spare: int = 0
    widths: tuple[int, ...] = ()

    def padded(self, rows: int) -> int:
        """Return the number of rows of a pass with this many rows in use."""
        padded = max(self.fewest, rows) + self.spare
        if self.most is not None:
            # Those of a part of a pass may include the spare ones of the pass.
            return min(padded, self.most + self.spare)
        return _divided(padded, self.widths, torch.get_num_threads())

    def agreed(self, group: Group) -> RowRule:
        """The strictest rule of the ranks of a replica, which must have the same rows."""
        rules: list[RowRule] = [self] * group.size
        if group.size > 1:
            dist.all_gather_object(rules, self, group=group.handle)
        most = [rule.most for rule in rules if rule.most is not None]
        return RowRule(
            max(rule.fewest for rule in rules),
            min(most, default=None),
            max(rule.spare for rule in rules),
            tuple(sorted({width for rule in rules for width in rule.widths})),
        )

    @classmethod
    def of(cls, weights: Iterable[Tensor], known: Callable[[Tensor], bool]) -> RowRule:
        """Return the rule for a model with weights [O, I], some ``known`` to give independent
        rows."""
        shapes = {(*weight.shape, weight.dtype, weight.device.type): weight for weight in weights}
        spare = int(any(outputs * dtype.itemsize % _VECTOR for outputs, _, dtype, _ in shapes))
        on_cpu = [shape for shape in shapes if shape[-1] == "cpu"]
        # Activations with a gate have half the outputs of their product.
        widths = {part for outputs, *_ in on_cpu for part in (outputs, -(-outputs // 2))}
        fewest = _FEWEST
        for shape in on_cpu:
            if known(shapes[shape]):
                continue
            needed = _fewest_rows(*shape[:3], torch.get_num_threads())
            if needed is None:
                return cls(_TILE, _TILE, spare)
            fewest = max(fewest, needed)
        return cls(fewest, spare=spare, widths=tuple(sorted(widths)))


def some_weight(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """A weight to try products with, on the CPU."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(min(outputs, _OUTPUTS), inputs, generator=random).to(dtype)


@functools.lru_cache(maxsize=64)
def _fewest_rows(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> int | None:
    """The fewest rows of a product with a weight from which a row's bits do not depend on their
    number; None if they always do."""
    product = partial(F.linear, weight=some_weight(outputs, inputs, dtype))
    least = SMALL_PRODUCT // (outputs * inputs) + 1 if dtype.itemsize == 2 else 1
    some = (max(rows, least) for rows in _SOME)
    return next((rows for rows in some if independent(product, inputs, dtype, rows)), None)


@functools.lru_cache(maxsize=1024)
def _divided(rows: int, widths: tuple[int, ...], threads: int) -> int:
    """Return the fewest rows, at least ``rows``, for which each thread gets whole vectors of every
    width except at the end; threads run other code for remainders."""

    def whole(numbers: int) -> bool:
        used = min(threads, -(-numbers // _GRAIN))
        return used < 2 or -(-numbers // used) % _VECTOR == 0

    most = rows + _VECTOR * threads
    even = (n for n in range(rows, most) if all(whole(n * width) for width in widths))
    return next(even, rows)


@torch.inference_mode()
def independent(
    product: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype, fewest: int = _FEWEST
) -> bool:
    """True if rows of a product do not depend on their number, if they are ``fewest`` or more, nor
    on their place, with which the alignment of a row in memory changes."""
    sizes = _TRIED if torch.get_num_threads() == 1 else (*_TRIED, *_SHARED)
    tried = [rows for rows in sizes if rows >= fewest] or [fewest]
    x_MI = some_weight(max(_TRIED[-1], fewest) + 1, inputs, dtype)
    whole_MO = product(x_MI)
    return all(
        torch.equal(product(x_MI[first : first + rows].clone()), whole_MO[first : first + rows])
        for rows in tried
        for first in (0, 1)
    )


class PackedWeight(nn.Parameter):
    """A weight [O, I] whose products use a packed copy while this is ``active``; the first product
    makes the copy. Otherwise it is an ordinary parameter."""

    active: ClassVar[bool] = False
    copy: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is not F.linear or not cls.active:
                return func(*args, **(kwargs or {}))
            x, weight, *bias = args
            if weight.copy is None:
                weight.copy = packed(weight)
            return packed_linear(x, weight.copy, *bias, **(kwargs or {}))


class PackedWeights:
    """Within this context products of float32 matrices on CPUs use packed copies, if rows do not
    depend on each other and memory suffices. Not thread-safe."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        chosen = [weight for weight in weights if _suits(weight)]
        if sum(weight.nbytes for weight in chosen) > SHARE * psutil.virtual_memory().available:
            return
        for weight in chosen:
            # In its place: modules and tables hold the parameter itself.
            weight.__class__ = PackedWeight  # type: ignore[assignment]

    def __enter__(self) -> None:
        PackedWeight.active = True

    def __exit__(self, *_: object) -> None:
        PackedWeight.active = False


def is_packed(weight: Tensor) -> bool:
    """True if :class:`PackedWeights` multiplies by a packed copy of this weight."""
    return isinstance(weight, PackedWeight)


def _suits(weight: Tensor) -> bool:
    if is_packed(weight):
        return False
    plain = (
        isinstance(weight, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
    )
    if not plain or weight.numel() < LEAST or not torch.backends.mkldnn.is_available():
        return False
    return _independent(*weight.shape)


@functools.cache
def _independent(outputs: int, inputs: int) -> bool:
    weight = packed(some_weight(outputs, inputs, torch.float32))
    return independent(lambda x_MI: packed_linear(x_MI, weight), inputs, torch.float32)


@torch.inference_mode()
def packed(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's layout, for :func:`packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _ROWS)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x A^T + b, [..., O]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
