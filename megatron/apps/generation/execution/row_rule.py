"""Row counts and weight layouts for which a row's result does not depend on the other rows.

On CPUs a row of a GEMM usually has the same bits in every GEMM of at least four rows, or eight if
several threads share it. This is measured with the model's own weight shapes. Where it fails, all
GEMMs use the same number of rows. On other devices this is not guaranteed.

Float32 weights on CPUs are packed in the layout of oneDNN's kernels. GEMMs with few rows then take
half the time, and differ from plain ones by rounding. Evaluations use the plain weights.

Shapes: M rows of a GEMM, I inputs, O outputs.
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
_SOME = (_FEWEST, 8, 12, 16, 24)  # candidates for the fewest rows
_TILE = 32
_TRIED = (4, 5, 7, 8, 13, 16, 31, 33, 64)
# Row counts that may leave only the last few rows to a thread.
_SHARED = (9, 10, 11, 12, 17, 18, 19, 25)
_OUTPUTS = 4096  # maximum number of outputs of a measured GEMM
# Number of bytes that elementwise CPU kernels process at a time. The remainder uses other code.
_VECTOR = 128
SMALL_PRODUCT = 16**3
"""Number of multiply-adds up to which torch computes 16-bit GEMMs on CPUs with a different kernel.
The results differ too rarely to be found by measuring."""
# Minimum number of elements per thread: elementwise kernels split larger tensors over threads.
_GRAIN = 2**15
LEAST = 2**18  # minimum size of a packed weight, in elements: calling this kernel has more overhead
SHARE = 0.25  # maximum share of free memory for packed weights; none is packed if they need more
_ROWS = 64  # number of rows for which oneDNN chooses the layout


@dataclass(frozen=True)
class RowRule:
    """Rule for the number of rows of a pass: ``fewest`` to ``most`` rows (no maximum if None), plus
    ``spare`` rows, so that the last row is never in use. The row count is also chosen so that
    tensors with these ``widths`` are split over threads in whole vectors."""

    fewest: int = _FEWEST
    most: int | None = None
    spare: int = 0
    widths: tuple[int, ...] = ()

    def padded(self, rows: int) -> int:
        """Return the number of rows, with padding, of a pass with ``rows`` rows in use."""
        padded = max(self.fewest, rows) + self.spare
        if self.most is not None:
            # ``rows`` may come from an already padded pass, and then includes its spare rows.
            return min(padded, self.most + self.spare)
        return _divided(padded, self.widths, torch.get_num_threads())

    def agreed(self, group: Group) -> RowRule:
        """Return the strictest rule of a model replica's ranks, since all of them must use the same
        row count. Collective: every rank of ``group`` must call it."""
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
        """Return the rule for a model with weights [O, I]. Weights for which ``known`` returns true
        are known to have independent rows and are not measured."""
        shapes = {(*weight.shape, weight.dtype, weight.device.type): weight for weight in weights}
        spare = int(any(outputs * dtype.itemsize % _VECTOR for outputs, _, dtype, _ in shapes))
        on_cpu = [shape for shape in shapes if shape[-1] == "cpu"]
        # The output of a gated activation is half as wide as that of its GEMM.
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
    """Return a random CPU weight, with at most ``_OUTPUTS`` outputs, to measure GEMMs with."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(min(outputs, _OUTPUTS), inputs, generator=random).to(dtype)


@functools.lru_cache(maxsize=64)
def _fewest_rows(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> int | None:
    """Return the fewest rows of a GEMM with a weight of this shape from which a row's bits do not
    depend on the number of rows, or None if they always do. Measured with random values."""
    product = partial(F.linear, weight=some_weight(outputs, inputs, dtype))
    least = SMALL_PRODUCT // (outputs * inputs) + 1 if dtype.itemsize == 2 else 1
    some = (max(rows, least) for rows in _SOME)
    return next((rows for rows in some if independent(product, inputs, dtype, rows)), None)


@functools.lru_cache(maxsize=1024)
def _divided(rows: int, widths: tuple[int, ...], threads: int) -> int:
    """Return the smallest row count, at least ``rows``, for which each thread gets whole vectors of
    tensors of every width, except at the end: a partial vector uses different code. Falls back to
    ``rows``."""

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
    """Return whether the bits of a row do not depend on the number of rows, from ``fewest`` up, nor
    on the row's index, which changes its alignment in memory."""
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
    """Weight [O, I] that is multiplied through a packed copy while ``active`` is set on the class.
    The copy is made on first use. Otherwise this is an ordinary parameter."""

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
    """Context manager in which float32 GEMMs on CPUs use packed copies of the weights, if rows are
    independent with packed weights and memory suffices. Not thread-safe."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        chosen = [weight for weight in weights if _suits(weight)]
        if sum(weight.nbytes for weight in chosen) > SHARE * psutil.virtual_memory().available:
            return
        for weight in chosen:
            # Changed in place, because modules and tables refer to the parameter object itself.
            weight.__class__ = PackedWeight  # type: ignore[assignment]

    def __enter__(self) -> None:
        PackedWeight.active = True

    def __exit__(self, *_: object) -> None:
        PackedWeight.active = False


def is_packed(weight: Tensor) -> bool:
    """Return whether :class:`PackedWeights` uses a packed copy of this weight."""
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
    """Return the weight in oneDNN's layout, for :func:`packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _ROWS)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x A^T + b, [..., O], for a packed weight A."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
