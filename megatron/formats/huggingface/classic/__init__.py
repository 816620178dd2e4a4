"""Decoders of 2019 to 2023, most with LayerNorm: a file for each group of relatives."""

from __future__ import annotations

from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.classic.learned import BIOGPT, GPT_BIGCODE, GPT_NEO, XGLM
from megatron.formats.huggingface.classic.mpt import MPT
from megatron.formats.huggingface.classic.rotary import (
    CODEGEN,
    GPTJ,
    PERSIMMON,
    PHI,
    STABLELM,
    STARCODER2,
)

CLASSIC: tuple[Architecture, ...] = (
    STABLELM, STARCODER2, PHI, PERSIMMON, GPT_BIGCODE, GPT_NEO, BIOGPT, XGLM, GPTJ, CODEGEN, MPT,
)  # fmt: skip
"""In the order in which an export looks for one that fits."""
