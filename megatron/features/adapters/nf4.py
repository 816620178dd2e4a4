"""4-bit weights in NF4: blocks of 64 weights with one scale each (Dettmers et al. 2023,
arXiv:2305.14314, section 3). QLoRA uses them for the frozen weights of linear layers.

Each weight is one of 16 quantiles of the normal distribution times the largest absolute value of
its block. With double quantisation, these scales are stored in 8 bits after subtracting their mean,
in groups of 256 with a float32 scale each: 0.516 bytes per weight instead of 0.5625. Codes and
their packing are those of bitsandbytes, whose kernels are used on GPUs if it is installed.

Quantised weights are not parameters: they are not cast, broadcast, partitioned or saved. For each
GEMM a layer converts its weight to 16 or 32 bits and frees the result afterwards. The backward pass
converts the weight again.

Shapes: O rows and I columns of a rank's shard of a matrix, P = I / 2, K blocks of a row, G groups
of blocks of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.layers import ParallelLinear
from megatron.parallel.mesh import Coordinates
from megatron.parallel.random import generator
from megatron.parallel.shard import init_of, shard_of

BLOCK, GROUP = 64, 256
"""Number of weights per scale, and of scales per second-level scale."""

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (appendix E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_AT_ONCE = 2**17
"""Number of weights that a CPU converts at a time. Their float32 values fit into its cache."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """Rows or columns of a matrix in 4 bits.

    Attributes:
        codes_OP: two 4-bit codes per byte, the first in the high bits; uint8.
        scales_OK: scales of the blocks; float32, or uint8 with double quantisation.
        groups_G: scales of the groups of the whole matrix. None without double quantisation.
        mean: mean of all block scales, a scalar. None without double quantisation.
        first: index of the first stored block in the whole matrix.
        stride: blocks per row of the whole matrix.
        columns: columns of this slice of the matrix within the stored blocks.
    """

    codes_OP: Tensor
    scales_OK: Tensor
    groups_G: Tensor | None
    mean: Tensor | None
    first: int
    stride: int
    columns: slice

    def part(self, rows: slice, columns: slice) -> QuantisedMatrix:
        """Return a copy of some rows and columns. Must be called on a whole matrix."""
        begin, end = columns.start // BLOCK, -(-columns.stop // BLOCK)
        return QuantisedMatrix(
            self.codes_OP[rows, begin * BLOCK // 2 : end * BLOCK // 2].clone(),
            self.scales_OK[rows, begin:end].clone(),
            self.groups_G,
            self.mean,
            first=rows.start * self.stride + begin,
            stride=self.stride,
            columns=slice(columns.start - begin * BLOCK, columns.stop - begin * BLOCK),
        )

    def tensors(self) -> list[Tensor]:
        """Return all stored tensors."""
        tensors = (self.codes_OP, self.scales_OK, self.groups_G, self.mean)
        return [each for each in tensors if each is not None]

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.tensors())

    def scales(self) -> Tensor:
        """Return the scales of the blocks, float32 [O, K]."""
        if self.groups_G is None or self.mean is None:
            return self.scales_OK
        rows, blocks = self.scales_OK.shape
        device = self.scales_OK.device
        number_OK = torch.arange(rows, device=device)[:, None] * self.stride + self.first
        number_OK = number_OK + torch.arange(blocks, device=device)
        of_group_OK = self.groups_G[number_OK // GROUP]
        return _dynamic_code(device)[self.scales_OK.int()] * of_group_OK + self.mean

    def write(self, out_OI: Tensor) -> None:
        """Write the weights into ``out_OI``, rounded to its dtype."""
        scales_OK, kernel = self.scales(), _kernel(out_OI.device.type)
        shape = (len(out_OI), scales_OK.shape[1] * BLOCK)
        if kernel is not None and out_OI.dtype != torch.float64:
            weights = kernel(self.codes_OP, scales_OK, BLOCK, "nf4", shape, out_OI.dtype)
            out_OI.copy_(weights[:, self.columns])
            return
        pairs = _pairs(out_OI.device)
        for rows in _some_rows(out_OI, shape[1]):
            weights = pairs.index_select(0, self.codes_OP[rows].flatten().int())
            values = weights.view(torch.float32).view(-1, BLOCK)
            values *= scales_OK[rows].reshape(-1, 1)
            out_OI[rows] = values.view(-1, shape[1])[:, self.columns]


def quantise(weight_OI: Tensor, double: bool) -> QuantisedMatrix:
    """Quantise a whole matrix. The last block of a row is shorter if 64 does not divide the row
    length."""
    rows, columns = weight_OI.shape
    stride, bounds = -(-columns // BLOCK), _bounds(_code(weight_OI.device))
    codes_OP = weight_OI.new_empty(rows, stride * BLOCK // 2, dtype=torch.uint8)
    scales_N = weight_OI.new_empty(rows * stride, dtype=torch.float32)
    for some in _some_rows(weight_OI, columns):
        padded_OI = F.pad(weight_OI[some].float(), (0, -columns % BLOCK))
        blocks_NB = padded_OI.reshape(-1, BLOCK)
        of_blocks_N = blocks_NB.abs().amax(1)
        scales_N[some.start * stride : some.stop * stride] = of_blocks_N
        relative_NB = blocks_NB * (1.0 / of_blocks_N.clamp(min=1e-38))[:, None]
        # On a CPU this loop takes two thirds as long as torch.bucketize.
        codes_NB = torch.zeros_like(relative_NB, dtype=torch.uint8)
        for bound in bounds:
            codes_NB += relative_NB > bound
        codes_OP[some] = (codes_NB[:, ::2] << 4 | codes_NB[:, 1::2]).view(len(padded_OI), -1)
    groups_G = mean = None
    if double:
        mean = scales_N.mean()
        centred_N = scales_N - mean
        grouped_GM = F.pad(centred_N, (0, -len(centred_N) % GROUP)).view(-1, GROUP)
        groups_G = grouped_GM.abs().amax(1)
        relative_GM = grouped_GM * (1.0 / groups_G.clamp(min=1e-38))[:, None]
        code = _dynamic_code(weight_OI.device)
        codes = torch.bucketize(relative_GM, _bounds(code)).to(torch.uint8)
        scales_N = codes.flatten()[: len(scales_N)]
    whole = slice(0, columns)
    return QuantisedMatrix(codes_OP, scales_N.view(rows, -1), groups_G, mean, 0, stride, whole)


def bytes_of(weights: int, double: bool) -> float:
    """Return the size of ``weights`` 4-bit weights in bytes."""
    scale = 1 + 4 / GROUP if double else 4
    return weights * (0.5 + scale / BLOCK)


def _some_rows(weight_OI: Tensor, columns: int) -> Iterator[slice]:
    """Yield slices that cover the rows of a matrix: a few rows at a time on a CPU, else all."""
    rows = len(weight_OI)
    step = max(1, _AT_ONCE // columns) if weight_OI.device.type == "cpu" else max(1, rows)
    return (slice(at, min(at + step, rows)) for at in range(0, rows, step))


def _bounds(code: Tensor) -> Tensor:
    """Return the midpoints between neighbouring values of a code."""
    return (code[:-1] + code[1:]) / 2


@cache
def _code(device: torch.device) -> Tensor:
    return torch.tensor(_NF4, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two float32 values of every byte, stored as one float64 each, [256]. Looking up
    one 64-bit value is faster than looking up two 32-bit values."""
    byte = torch.arange(256, device=device)
    numbers_2 = _code(device)[torch.stack((byte >> 4, byte & 15), dim=1)]
    return numbers_2.contiguous().view(torch.float64).flatten()


@cache
def _dynamic_code(device: torch.device) -> Tensor:
    """Return the values of the signed dynamic 8-bit data type, in ascending order (Dettmers et al.
    2022, arXiv:2110.02861, section 1.3). The larger the power of ten, the more bits its fraction
    has."""
    code = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (10.0 ** (exponent - 6)) * (edges[:-1] + edges[1:]) / 2
        code += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(code), device=device)


@cache
def _kernel(device_type: str) -> Callable[..., Tensor] | None:
    """Return bitsandbytes' dequantisation kernel for a device type, or None if unavailable."""
    if device_type != "cuda":
        return None
    try:
        import bitsandbytes  # noqa: F401  # registers its operators
    except ImportError:
        return None
    operators: Any = torch.ops.bitsandbytes
    kernel: Callable[..., Tensor] = operators.dequantize_4bit
    return kernel


WEIGHTS = ("weight", "kv_weight")
"""Names of a linear layer's weight attributes."""


class QuantisedWeight:
    """A rank's shard [OP, IP] of a linear layer's weight in 4 bits. Fused matrices are quantised
    separately, each as a whole, so that the values do not depend on the parallel layout.

    Args:
        param: the parameter that this weight replaces.
        coordinates: coordinates of this rank.
        double: whether scales are quantised too.
    """

    requires_grad = False

    def __init__(self, param: nn.Parameter, coordinates: Coordinates, double: bool) -> None:
        self.shard, self.init = shard_of(param), init_of(param)
        self.shape = torch.Size(self.shard.local_shape(coordinates))
        self._coordinates, self._double = coordinates, double
        self._matrices: list[QuantisedMatrix] = []

    @property
    def filled(self) -> bool:
        return bool(self._matrices)

    @property
    def bytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return sum(matrix.bytes for matrix in self._matrices)

    def tensors(self) -> list[Tensor]:
        """Return all stored tensors, in order."""
        return [tensor for matrix in self._matrices for tensor in matrix.tensors()]

    @torch.no_grad()
    def fill(self, whole_OI: Tensor, device: torch.device) -> None:
        """Store this rank's shard of a weight, quantised on ``device`` matrix by matrix."""
        assert tuple(whole_OI.shape) == self.shard.canonical_shape, (whole_OI.shape, self.shard)
        ranges = self.shard.ranges(self._coordinates)
        rows = ranges.get(0, ((0, whole_OI.shape[0]),))
        columns = ranges.get(1, ((0, whole_OI.shape[1]),))
        self._matrices = []
        for first, end in self._edges():
            matrix: QuantisedMatrix | None = None
            for (start, length), (left, width) in product(rows, columns):
                if first <= start < end:
                    if matrix is None:
                        matrix = quantise(whole_OI[first:end].to(device), self._double)
                    held = slice(start - first, start - first + length)
                    self._matrices.append(matrix.part(held, slice(left, left + width)))

    def initialise(self, name: str, seed: int, device: torch.device) -> None:
        """Store the initial values of the parameter with the canonical name ``name``."""
        self.fill(self.init.draw(self.shard.canonical_shape, generator(seed, name)), device)

    def _edges(self) -> Iterator[tuple[int, int]]:
        """Yield the row range (begin, end) of each matrix fused in the weight."""
        cut, first = self.shard.over("tensor"), 0
        fused = cut is not None and cut.dim == 0 and cut.parts
        for length in fused or (self.shard.canonical_shape[0],):
            yield first, first + length
            first += length

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the weight dequantised to ``dtype``, [OP, IP], as a new tensor."""
        assert self._matrices, "no weights are loaded"
        device = self._matrices[0].codes_OP.device
        found_OI = torch.empty(self.shape, dtype=dtype, device=device)
        start = 0
        for matrix in self._matrices:
            end = start + len(matrix.codes_OP)
            matrix.write(found_OI[start:end])
            start = end
        assert start == len(found_OI)
        return found_OI


def quantise_layer(layer: ParallelLinear, double: bool) -> None:
    """Replace a layer's weight parameters with empty 4-bit weights. The values are lost."""
    for name in WEIGHTS:
        param = layer._parameters.get(name)
        if param is not None:
            delattr(layer, name)
            setattr(layer, name, QuantisedWeight(param, layer.tp.coordinates, double))


def quantised_weights(module: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """Yield (registered name, weight) for every 4-bit weight. Weights that are parts of the same
    canonical parameter have the same name."""
    for prefix, layer in module.named_modules():
        for name in WEIGHTS:
            values: Mapping[str, Any] = layer.__dict__
            weight = values.get(name)
            if isinstance(weight, QuantisedWeight):
                yield f"{prefix}.{weight.shard.whole or name}", weight
