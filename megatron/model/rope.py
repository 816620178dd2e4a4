"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split order of
GPT-NeoX and Llama: channel i is rotated together with channel i + R/2."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=8)
def rope_table(
    length: int, rotated: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. length - 1, each float32 [length, rotated].

    The angle of channel pair i at position p is p * base^(-2i / rotated).
    """
    # The cache outlives the call, which may run under inference mode.
    with torch.inference_mode(False), torch.no_grad():
        exponents = torch.arange(0, rotated, 2, device=device, dtype=torch.float32) / rotated
        frequencies = 1.0 / (base**exponents)
        angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def apply_rope(x_BNSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R channels of each head.

    Args:
        x_BNSD: queries or keys, [B, N, S, D].
        cos: [S, R] or [B, 1, S, R].
        sin: like ``cos``.
    """
    rotated = cos.shape[-1]
    x, rest = x_BNSD[..., :rotated], x_BNSD[..., rotated:]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    x = x * cos.to(x.dtype) + turned * sin.to(x.dtype)
    return torch.cat([x, rest], dim=-1) if rest.shape[-1] else x
