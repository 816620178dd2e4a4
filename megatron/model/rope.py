"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864), RoPE scaling for sequences
longer than in pretraining, and sinusoidal position embeddings.

Channels are in the half-split order of GPT-NeoX and Llama: of R rotated channels, i is rotated
together with i + R/2, or with --rotary-interleaved 2i with 2i + 1. Scaled frequencies equal those
of transformers' ``modeling_rope_utils`` for the same JSON. Its functions are not called: they
require transformers' configurations, and importing them takes longer than a short run.

Shapes: B batch, S sequence, N heads, D head width, P = R/2 pairs of rotated channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.positions import PositionsConfig, RopeScaling
from megatron.model.attention_masks import tensor_cache


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotation of the first R channels of a block's queries and keys. ``positions`` is the model's
    maximum sequence length. With ``interleaved``, neighbouring channels form a pair. Equal
    rotations share a ``number``, the argument of :func:`rope_table`."""

    rotated: int
    base: float
    positions: int
    scaling: RopeScaling = RopeScaling("default")
    interleaved: bool = False
    number: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self not in _ROTATIONS:
            _ROTATIONS.append(self)
        object.__setattr__(self, "number", _ROTATIONS.index(self))

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> RotaryEmbedding | None:
        """Return the rotation of block ``layer``, or None for a block without RoPE."""
        positions = config.positions
        if not positions.rotates(layer):
            return None
        base, scaling = positions.rotary_base, positions.rope_scaling
        if config.attention.window(layer) is not None and positions.rotary_base_local is not None:
            base, scaling = positions.rotary_base_local, RopeScaling("default")
        longest = positions.max_position_embeddings
        return cls(config.rotated, base, longest, scaling, positions.rotary_interleaved)

    def rotate(self, x_BSND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return queries or keys rotated by the result of :meth:`angles`."""
        return apply_rope(x_BSND, *angles, self.interleaved)

    def angles(
        self,
        length: int,
        positions_BS: Tensor | None,
        lengths_BS: Tensor | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of ``length`` current tokens for :func:`apply_rope`: each [S, 1,
        R], or [B, S, 1, R] with positions, in ``dtype`` or at least float32.

        LongRoPE uses other frequencies for sequences longer than the original maximum. The length
        of the whole sequence decides, so that positions may restart with each document. With a KV
        cache it is given by ``lengths_BS``.
        """
        original, dtype = 0, torch.promote_types(dtype, torch.float32)
        if self.scaling.rope_type == "longrope":
            original = self.scaling.original_max_position_embeddings or 0
            assert original
        if original and lengths_BS is not None and positions_BS is not None:
            tables = (rope_table(self.number, long, device, dtype) for long in (False, True))
            short, long = (tuple(x[positions_BS].unsqueeze(2) for x in table) for table in tables)
            is_long = (lengths_BS > original)[..., None, None]
            return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])
        cos, sin = rope_table(self.number, 0 < original < length, device, dtype)
        if positions_BS is None:
            return cos[:length, None], sin[:length, None]
        at_BS1 = positions_BS.unsqueeze(2)
        return cos[at_BS1], sin[at_BS1]


@dataclass(frozen=True)
class Temperature:
    """Factor for queries at position p (from 0), which keeps attention to many keys sharp
    (Nakanishi 2025, arXiv:2501.19399; Llama 4): 1 + ``scale`` log(1 + floor((p + ``first``) /
    ``floor``))."""

    scale: float
    floor: int
    first: int = 1

    @classmethod
    def of(cls, positions: PositionsConfig, layer: int) -> Temperature | None:
        """Return the scaling that the flags select for block ``layer``, or None."""
        scale, rotary = positions.attention_temperature, positions.attention_temperature_rotary
        if scale is None or positions.rotates(layer) != rotary:
            return None
        return cls(scale, positions.attention_temperature_floor, int(not rotary))

    def applied(self, q_BSND: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Return the scaled queries, computed in float32 or better. ``positions_BS`` is None for 0,
        1, 2, ..."""
        if positions_BS is None:
            positions_BS = torch.arange(q_BSND.shape[1], device=q_BSND.device)[None]
        kind = torch.promote_types(q_BSND.dtype, torch.float32)
        floors_BS = ((positions_BS + self.first) // self.floor).to(kind)
        factors_BS = 1 + self.scale * torch.log1p(floors_BS)
        return (q_BSND * factors_BS[..., None, None]).to(q_BSND.dtype)


_ROTATIONS: list[RotaryEmbedding] = []
"""All distinct rotations. A rotation's ``number`` is its index in this list."""


def rope_table(
    number: int, long: bool, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [positions, R], for all positions of the rotation ``number``.
    The angle of channel pair i at position p is p * base^(-2i / R) without scaling. ``long`` tells
    whether the sequence is longer than the original maximum (LongRoPE)."""
    # Takes a number because torch 2.11 cannot compile such a call with a frozen dataclass.
    return _table(_ROTATIONS[number], long, device, dtype)


@tensor_cache(8)
def _table(
    rotation: RotaryEmbedding, long: bool, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, rotation.rotated, 2, device=device, dtype=dtype)
    frequencies_P = 1.0 / (rotation.base ** (exponents / rotation.rotated))
    frequencies_P, factor = scaled_frequencies(
        frequencies_P, rotation.base, rotation.scaling, rotation.positions, long
    )
    places = torch.arange(rotation.positions, device=device, dtype=dtype)
    angles = places[:, None] * frequencies_P
    if rotation.interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * factor, angles.sin() * factor


def apply_rope(x_BSND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R channels of each head of queries or keys, [B, S, N, D], by cosines and
    sines [S, 1, R] or [B, S, 1, R]. With ``interleaved``, neighbouring channels form a pair."""
    rotated = cos.shape[-1]
    x, rest = x_BSND[..., :rotated], x_BSND[..., rotated:]
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-second, first], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    x = x * cos.to(x.dtype) + turned * sin.to(x.dtype)
    return torch.cat([x, rest], dim=-1) if rest.shape[-1] else x


def scaled_frequencies(
    frequencies_P: Tensor, base: float, scaling: RopeScaling, positions: int, long: bool
) -> tuple[Tensor, float]:
    """Return the scaled frequencies [P] and the factor for cosines and sines. ``frequencies_P`` are
    base^(-2i / R) in radians per position. ``dynamic`` would scale only sequences longer than
    ``positions``, which no model accepts. ``long`` is as in :func:`rope_table`."""
    if scaling.rope_type in ("default", "dynamic"):
        return frequencies_P, 1.0
    if scaling.rope_type == "linear":
        assert scaling.factor
        return frequencies_P / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies_P, scaling), 1.0
    if scaling.rope_type == "proportional":
        assert scaling.partial_rotary_factor
        kept_P = frequencies_P.clone()
        kept_P[int(len(kept_P) * scaling.partial_rotary_factor) :] = 0.0
        return kept_P, 1.0
    if scaling.rope_type == "yarn":
        return _yarn(frequencies_P, base, scaling)
    assert scaling.rope_type == "longrope"
    return _longrope(frequencies_P, scaling, positions, long)


def _llama3(frequencies_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale as in Llama 3.1: high frequencies are unchanged, low ones divided by the factor. In
    between, the two are interpolated by the number of rotations within the original length."""
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert original and factor and low and high
    turns_P = original * frequencies_P / (2 * math.pi)
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return frequencies_P * (kept_P + (1 - kept_P) / factor)


def _yarn(frequencies_P: Tensor, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Scale as in YaRN (Peng et al. 2023, arXiv:2309.00071): "NTK-by-parts" frequencies, with a
    ramp over the pair's index (section 3.2), and the attention factor (section 3.4)."""
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    assert original and factor
    pairs = frequencies_P.shape[0]

    def pair_of(turns: float) -> float:
        """Return the (fractional) index of the pair that makes this number of rotations within the
        original length."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    first, last = pair_of(scaling.beta_fast or 32.0), pair_of(scaling.beta_slow or 1.0)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001  # 0.001: a step, not a ramp
    numbers_P = torch.arange(pairs, device=frequencies_P.device, dtype=frequencies_P.dtype)
    scaled_P = ((numbers_P - first) / width).clamp(0, 1)
    frequencies_P = frequencies_P * (1 - scaled_P + scaled_P / factor)
    if scaling.attention_factor is not None:
        return frequencies_P, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        ratio = mscale(factor, scaling.mscale) / mscale(factor, scaling.mscale_all_dim)
        return frequencies_P, ratio
    return frequencies_P, mscale(factor)


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention factor 0.1 w ln(s) + 1 (equation 22), with DeepSeek's weight w."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(
    frequencies_P: Tensor, scaling: RopeScaling, positions: int, long: bool
) -> tuple[Tensor, float]:
    """Scale as in LongRoPE (Ding et al. 2024, arXiv:2402.13753). Each pair has two divisors, found
    by search: one for sequences up to the original length, and one for longer ones."""
    original = scaling.original_max_position_embeddings
    divisors = scaling.long_factor if long else scaling.short_factor
    assert original and divisors
    frequencies_P = frequencies_P / frequencies_P.new_tensor(divisors)
    of_length = scaling.long_mscale if long else scaling.short_mscale
    if of_length is not None:
        return frequencies_P, of_length
    if scaling.attention_factor is not None:
        return frequencies_P, scaling.attention_factor
    factor = scaling.factor or positions / original
    if factor <= 1:
        return frequencies_P, 1.0
    return frequencies_P, math.sqrt(1 + math.log(factor) / math.log(original))


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return sinusoidal position embeddings [..., H], computed in float32 or better: H/2 sines,
    then H/2 cosines with frequencies 10000^(-i / (H/2 - 1)), as in tensor2tensor and fairseq, and a
    zero if H is odd."""
    half, kind = width // 2, torch.promote_types(dtype, torch.float32)
    step = -math.log(10000.0) / max(half - 1, 1)
    frequencies = torch.exp(torch.arange(half, device=positions.device).to(kind) * step)
    angles = positions.unsqueeze(-1).to(kind) * frequencies
    return F.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, width % 2)).to(dtype)
