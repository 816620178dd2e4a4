"""Current dense decoders, most with RMSNorm. Each file has a group of related architectures."""

from __future__ import annotations

from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.decoders.glm import COHERE, COHERE2, COHERE_COMPASS, GLM, GLM4
from megatron.formats.huggingface.decoders.granite import (
    GRANITE,
    GRANITE4,
    GRANITE_SWA,
    HYPERCLOVAX,
)
from megatron.formats.huggingface.decoders.llamas import (
    BITNET,
    CWM,
    ERNIE4_5,
    GEMMA,
    HELIUM,
    HUNYUAN_V1_DENSE,
    INTERNLM3,
    IQUEST_CODER,
    MINISTRAL,
    MINISTRAL3,
    SEED_OSS,
    SMOLLM3,
    VAULTGEMMA,
)
from megatron.formats.huggingface.decoders.olmo import EXAONE4, OLMO, OLMO2, OLMO3
from megatron.formats.huggingface.decoders.ungated import APERTUS, ARCEE, JAIS2, NANOCHAT, NEMOTRON

DECODERS: tuple[Architecture, ...] = (
    MINISTRAL, MINISTRAL3, BITNET, CWM, SEED_OSS, HUNYUAN_V1_DENSE, ERNIE4_5, HELIUM, SMOLLM3,
    OLMO, OLMO2, OLMO3, EXAONE4, GRANITE, GRANITE4, GRANITE_SWA, HYPERCLOVAX, GLM, GLM4, COHERE,
    COHERE2, COHERE_COMPASS, GEMMA, VAULTGEMMA, ARCEE, JAIS2, NEMOTRON, APERTUS, NANOCHAT,
    INTERNLM3, IQUEST_CODER,
)  # fmt: skip
"""Architectures in the order in which an export tries them."""
