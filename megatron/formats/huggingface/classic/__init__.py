"""Decoders published from 2019 to 2023, most with LayerNorm. Each file has a group of related
ones."""

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
"""Architectures, in the order in which an export tries them."""
