"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split order of
GPT-NeoX and Llama: channel i is rotated together with channel i + R/2, R channels in all."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.positions import RopeScaling
from megatron.model.rope_scaling import stretched


@dataclass(frozen=True)
class RotaryEmbedding:
    """Which angles a block rotates its queries and keys by.

    Attributes:
        rotated: channels R of a head that are rotated.
        base: base of the frequencies.
        positions: the longest sequence that the model can take.
        scaling: how the frequencies are stretched.
    """

    rotated: int
    base: float
    positions: int
    scaling: RopeScaling = RopeScaling("default")

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> RotaryEmbedding | None:
        """That of block ``layer``; None where positions enter the model in another way."""
        positions = config.positions
        if positions.position_embedding_type != "rope":
            return None
        rotated = int(config.attention.kv_channels * positions.rotary_percent)
        base, scaling = positions.rotary_base, positions.rope_scaling
        if config.attention.window(layer) is not None and positions.rotary_base_local is not None:
            base, scaling = positions.rotary_base_local, RopeScaling("default")
        longest = positions.max_position_embeddings
        return _one_of_equals(cls(rotated, base, longest, scaling))

    def angles(
        self, length: int, positions_BS: Tensor | None, cached: bool, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines for :func:`apply_rope`, float32.

        Longrope has other frequencies for sequences that are longer than the original ones. What
        counts is the length of the whole sequence, so that positions which start anew with each
        document leave the frequencies alone; with a cache of earlier tokens it is the last position
        that tells the length.

        Args:
            length: tokens at hand.
            positions_BS: their positions; None for 0, 1, 2, ...
            cached: whether they follow on tokens in a cache.
            device: where to.

        Returns:
            Each [S, 1, R], or [B, S, 1, R] with positions.
        """
        long = False
        if self.scaling.rope_type == "longrope":
            assert self.scaling.original_max_position_embeddings
            whole = length
            if cached and positions_BS is not None:
                whole = int(positions_BS.max()) + 1
            long = whole > self.scaling.original_max_position_embeddings
        cos, sin = rope_table(self, long, device)
        if positions_BS is None:
            return cos[:length, None], sin[:length, None]
        at_BS1 = positions_BS.unsqueeze(2)
        return cos[at_BS1], sin[at_BS1]


@functools.cache
def _one_of_equals(rotation: RotaryEmbedding) -> RotaryEmbedding:
    """The first that equals it. What was compiled for a block serves all that rotate by the same
    object."""
    return rotation


def rope_table(
    rotation: RotaryEmbedding, long: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, each float32 [positions, R].

    The angle of channel pair i at position p is p * base^(-2i / R) where nothing is stretched.

    Args:
        rotation: the frequencies.
        long: whether the sequence is longer than the original ones (longrope).
        device: where the tables lie.
    """
    return _table(rotation, long, device)


@functools.lru_cache(maxsize=8)
def _table(rotation: RotaryEmbedding, long: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    # The cache outlives the call, which may run under inference mode.
    with torch.inference_mode(False), torch.no_grad():
        exponents = torch.arange(0, rotation.rotated, 2, device=device, dtype=torch.float32)
        frequencies_P = 1.0 / (rotation.base ** (exponents / rotation.rotated))
        frequencies_P, factor = stretched(
            frequencies_P, rotation.base, rotation.scaling, rotation.positions, long
        )
        places = torch.arange(rotation.positions, device=device, dtype=torch.float32)
        angles = places[:, None] * frequencies_P
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * factor, angles.sin() * factor


def apply_rope(x_BSND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R channels of each head.

    Args:
        x_BSND: queries or keys, [B, S, N, D].
        cos: [S, 1, R] or [B, S, 1, R].
        sin: like ``cos``.
    """
    rotated = cos.shape[-1]
    x, rest = x_BSND[..., :rotated], x_BSND[..., rotated:]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    x = x * cos.to(x.dtype) + turned * sin.to(x.dtype)
    return torch.cat([x, rest], dim=-1) if rest.shape[-1] else x
