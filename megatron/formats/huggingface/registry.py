"""The known architectures: a new one is a file and a name here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.config.flags import flag_of
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.bert import BERT, MEGATRON_BERT
from megatron.formats.huggingface.bloom import BLOOM
from megatron.formats.huggingface.falcon import FALCON
from megatron.formats.huggingface.gemma import GEMMA2, GEMMA3
from megatron.formats.huggingface.gpt2 import GPT2
from megatron.formats.huggingface.gpt_neox import GPT_NEOX
from megatron.formats.huggingface.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from megatron.formats.huggingface.opt import OPT
from megatron.formats.huggingface.phi3 import PHI3
from megatron.formats.huggingface.t5 import T5

ARCHITECTURES: tuple[Architecture, ...] = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, GPT_NEOX, OPT, FALCON, BLOOM,
    MEGATRON_BERT, BERT, T5,
)  # fmt: skip
"""The known architectures, the plainer ones first: a model that fits several is the first."""

_REASONS = {
    "gemma": "Gemma 1 differs from Gemma 2, and has no table",
    "gemma3": "it sees images too; the text model alone is gemma3_text (Gemma3ForCausalLM)",
    "RefinedWeb": "the name of Falcon before transformers knew it; write falcon",
    "RefinedWebModel": "the name of Falcon before transformers knew it; write falcon",
    "mt5": "write t5: it differs in name alone; its class is MT5ForConditionalGeneration",
    "umt5": "each block has relative positions of its own; those of a T5 are shared",
    "mixtral": "experts cannot be represented",
}
"""Explanations for some that look as if they were known."""


def architecture_of(model: ModelConfig, wanted: str | None = None) -> Architecture:
    """The architecture that a configuration fits: the ``model_type`` ``wanted``, or else that which
    the weights were read from, or the plainest that fits. Raises ValueError if it fits none, or not
    the wanted one; names the flags that it would need."""
    if model.shaping().get("retro_add_retriever"):
        raise ValueError(
            "a model with --retro-add-retriever reads neighbours, which no architecture of Hugging "
            "Face does: keep its checkpoint, or train without that flag"
        )
    origin = _find(model.hf_architecture)
    if wanted is None and origin is not None and not origin.misfits(model):
        return origin
    known: Sequence[Architecture] = (_named(wanted),) if wanted else _of_family(model.family)
    misfits = {architecture.title: architecture.misfits(model) for architecture in known}
    for architecture in known:
        if not misfits[architecture.title]:
            return architecture
    if wanted is not None:
        (needs,) = misfits.values()
        raise ValueError(
            f"--architecture {wanted}: a model with {_shape(model)} does not fit; "
            f"{known[0].title} needs {', '.join(needs)}"
        )
    nearest = sorted(misfits.items(), key=lambda item: len(item[1]))[:4]
    raise ValueError(
        f"a model with {_shape(model)} fits none of the {len(known)} known architectures of "
        f"Hugging Face ({', '.join(misfits)}). The nearest:"
        + "".join(f"\n  {title} needs {', '.join(wanted)}" for title, wanted in nearest)
    )


def departure(model: ModelConfig) -> str | None:
    """Why a model is not of the architecture that its weights were read from; None where it is."""
    if model.hf_architecture is None:
        return None
    origin = _find(model.hf_architecture)
    if origin is None:
        return f"the weights were read from {model.hf_architecture}, which is not known"
    needs = origin.misfits(model)
    if not needs:
        return None
    return f"the weights were read from {origin.title}, which needs {', '.join(needs)}"


def architecture_named(content: dict[str, Any], path: Path) -> Architecture:
    """The architecture that the parsed config.json at ``path`` names. Raises CheckpointError if it
    names none that is known."""
    name = content.get("model_type")
    if known := _find(name):
        return known
    reason = f" ({_REASONS[name]})" if isinstance(name, str) and name in _REASONS else ""
    raise CheckpointError(
        f"{path}: model_type is {name!r:.100}{reason}; expected one of "
        f"{', '.join(known.model_type for known in ARCHITECTURES)}"
    )


def _of_family(family: str) -> Sequence[Architecture]:
    """The architectures of models of a family; all if it has no architecture."""
    return [known for known in ARCHITECTURES if known.family == family] or ARCHITECTURES


def _find(model_type: str | None) -> Architecture | None:
    return next((known for known in ARCHITECTURES if known.model_type == model_type), None)


def _named(wanted: str) -> Architecture:
    if known := _find(wanted):
        return known
    raise ValueError(
        f"--architecture {wanted} is unknown; expected one of "
        f"{', '.join(known.model_type for known in ARCHITECTURES)}"
    )


def _shape(model: ModelConfig) -> str:
    """The flags that the architectures differ in, as the model has them."""
    flags, words = model.flags(), []
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        told = field.metadata["role"] and not field.metadata["internal"]
        if told and (field.name in _ALWAYS or value != field.default):
            words.append(flag_of(field) if isinstance(value, bool) else f"{flag_of(field)} {value}")
    return " ".join(words)


_ALWAYS = ("position_embedding_type", "normalization")
"""Flags that are shown even with their default value."""
