"""Stretched rotary frequencies, for sequences longer than those of the first training.

The results are those of transformers' ``modeling_rope_utils`` for the same JSON. P stands for the
pairs of channels that are rotated, R / 2 of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.config.positions import RopeScaling


def stretched(
    frequencies_P: Tensor, base: float, scaling: RopeScaling, positions: int, long: bool
) -> tuple[Tensor, float]:
    """Frequencies after stretching, float32 [P], and what cosines and sines are multiplied by.

    ``dynamic`` stretches only sequences longer than ``positions``, which no model here takes.

    Args:
        frequencies_P: base^(-2i / R) of each pair i, in radians per position.
        base: base of the frequencies.
        scaling: how to stretch them.
        positions: the longest sequence that the model can take.
        long: whether the sequence is longer than the original ones, for ``longrope``.
    """
    if scaling.rope_type in ("default", "dynamic"):
        return frequencies_P, 1.0
    if scaling.rope_type == "linear":
        assert scaling.factor
        return frequencies_P / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies_P, scaling), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(frequencies_P, base, scaling)
    assert scaling.rope_type == "longrope"
    return _longrope(frequencies_P, scaling, positions, long)


def _llama3(frequencies_P: Tensor, scaling: RopeScaling) -> Tensor:
    """By parts, as Llama 3.1: short wavelengths stay, long ones are stretched, and between the two
    bounds the share that stays grows with the number of turns over the original length."""
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert original and factor and low and high
    turns_P = original * frequencies_P / (2 * math.pi)
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return frequencies_P * (kept_P + (1 - kept_P) / factor)


def _yarn(frequencies_P: Tensor, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Peng et al. 2023 (arXiv:2309.00071), section 3.2 (frequencies by parts; the ramp runs over
    the number of the pair) and 3.4 (attention factor)."""
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    assert original and factor
    pairs = frequencies_P.shape[0]

    def pair_of(turns: float) -> float:
        """The pair, as a fraction, that turns this often over the original length."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    first, last = pair_of(scaling.beta_fast or 32.0), pair_of(scaling.beta_slow or 1.0)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001  # a step
    numbers_P = torch.arange(pairs, device=frequencies_P.device, dtype=torch.float32)
    stretched_P = ((numbers_P - first) / width).clamp(0, 1)
    frequencies_P = frequencies_P * (1 - stretched_P + stretched_P / factor)
    if scaling.attention_factor is not None:
        return frequencies_P, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return frequencies_P, _mscale(factor, scaling.mscale) / _mscale(
            factor, scaling.mscale_all_dim
        )
    return frequencies_P, _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    """0.1 ln(s) + 1, equation 22 of the paper; the weight is DeepSeek's."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(
    frequencies_P: Tensor, scaling: RopeScaling, positions: int, long: bool
) -> tuple[Tensor, float]:
    """Ding et al. 2024 (arXiv:2402.13753): a divisor for each pair, found by search, and one set of
    them for sequences up to the original length."""
    original = scaling.original_max_position_embeddings
    divisors = scaling.long_factor if long else scaling.short_factor
    assert original and divisors
    frequencies_P = frequencies_P / torch.tensor(divisors, device=frequencies_P.device)
    if scaling.attention_factor is not None:
        return frequencies_P, scaling.attention_factor
    factor = scaling.factor or positions / original
    if factor <= 1:
        return frequencies_P, 1.0
    return frequencies_P, math.sqrt(1 + math.log(factor) / math.log(original))
