"""Floating-point operations of a transformer, and what a device could do.

Model FLOPs only: matrix products with two operations per multiply-add, the backward pass twice the
forward pass, and nothing for what recomputation repeats, so that the model-FLOP utilisation of two
runs compares what they achieve and not how they save memory.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TransformerShape:
    """The numbers of a transformer that its FLOPs depend on.

    Args:
        num_layers: number of blocks.
        hidden_size: width of the residual stream.
        ffn_hidden_size: inner width of the MLP.
        num_attention_heads: query heads.
        num_query_groups: key and value heads; as many as query heads without grouping.
        kv_channels: width of one head.
        seq_length: tokens of a sample.
        padded_vocab_size: rows of the output projection.
        gated: whether the MLP has a gate, a third matrix.
        windows: keys that a query of each block sees, None for all; empty where all blocks see all.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    padded_vocab_size: int
    gated: bool = False
    windows: tuple[int | None, ...] = ()

    def flops_per_token(self, *, causal: bool) -> float:
        """Model FLOPs of one token, forward and backward.

        With ``causal=False`` attention scores count whole, as in the formula of Narayanan et al.
        2021 (arXiv:2104.04473, section 5.1), ``72 B s L h^2 (1 + s/6h + V/12hL)`` without
        recomputation, which Megatron-LM extends to grouped queries and gated MLPs. With
        ``causal=True`` a query counts half of the sequence, the mean of what it attends to, as in
        Dao 2023 (FlashAttention-2, arXiv:2307.08691, section 4.1). A block with a window counts the
        window instead of the sequence, causally w - w^2 / 2s keys of it.
        """
        query_size = self.num_attention_heads * self.kv_channels
        kv_size = self.num_query_groups * self.kv_channels
        projections = 2 * self.hidden_size * (2 * query_size + 2 * kv_size)
        mlp = 2 * (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size
        head = 2 * self.hidden_size * self.padded_vocab_size
        # Scores, and the mix of values.
        attention = 2 * (2 * query_size * self._keys(causal))
        forward = self.num_layers * (projections + mlp) + attention + head
        return 3.0 * forward

    def _keys(self, causal: bool) -> float:
        """Keys that a query attends to, on average over the sequence, summed over the blocks."""
        length = self.seq_length
        seen = [min(w or length, length) for w in self.windows or (None,) * self.num_layers]
        # Of a causal window's queries the first ones have less before them.
        return sum(w - w**2 / (2 * length) if causal else w for w in seen)

    def flops_per_step(self, samples: int, *, causal: bool) -> float:
        """Model FLOPs of an optimizer step on ``samples`` sequences, over all devices."""
        return samples * self.seq_length * self.flops_per_token(causal=causal)


# Dense 16-bit tensor-core rates (bfloat16; float16 on Volta and Turing, which have no bfloat16),
# FLOP/s of one device, from the makers' data sheets, without structured sparsity. The first pattern
# that matches a device's name counts, so variants stand before the part that they derive from.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB300", 2500e12),
    (r"B300", 2250e12),
    (r"GB200", 2500e12),
    (r"B200", 2250e12),
    (r"H200 NVL", 835.5e12),
    (r"GH200|H200", 989e12),
    (r"H100 PCIe", 756e12),
    (r"H100 NVL", 835.5e12),
    (r"H100|H800", 989e12),
    (r"H20", 148e12),
    (r"A100|A800", 312e12),
    (r"A40", 149.7e12),
    (r"A30", 165e12),
    (r"A10", 125e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"V100", 125e12),
    (r"T4", 65e12),
    (r"RTX 6000 Ada", 364e12),
    (r"RTX A6000", 154.8e12),
    (r"RTX 4090$", 165.2e12),
    (r"RTX 3090$", 71e12),
    (r"MI355X", 2516.6e12),
    (r"MI325X|MI300X", 1307.4e12),
    # One device is one of the two dies.
    (r"MI250X", 191.5e12),
)


def peak_flops_of(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of the accelerator with this name, None if it is not in the table.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it, "NVIDIA H100 80GB HBM3".
    """
    for pattern, flops in _PEAKS:
        if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE):
            return flops
    return None


def peak_flops(device: torch.device) -> float | None:
    """Dense 16-bit FLOP/s of ``device`` from its maker's data sheet.

    None for CPUs and unknown accelerators: :func:`measure_matmul_peak` finds what they reach.
    """
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def measure_matmul_peak(dtype: torch.dtype, device: torch.device, seconds: float = 0.5) -> float:
    """The highest rate, in FLOP/s, that square matrix products of ``dtype`` reach on ``device``.

    The products grow from 256 to 8192 a side while there is time left, for about ``seconds``.
    Processes that share a machine measure what one of them gets when they measure together.
    """
    deadline = time.perf_counter() + seconds
    best, side = 0.0, 256
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        # The first product of a size pays for set-up and does not count.
        _seconds_of_matmul(a, b)
        duration = _seconds_of_matmul(a, b)
        best = max(best, 2 * side**3 / duration)
        left = deadline - time.perf_counter()
        if left <= 0:
            return best
        # The next size takes 8 times as long, and runs twice.
        if side < 8192 and 16 * duration < left:
            side *= 2


def _seconds_of_matmul(a: torch.Tensor, b: torch.Tensor) -> float:
    _synchronize(a.device)
    start = time.perf_counter()
    torch.matmul(a, b)
    _synchronize(a.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
