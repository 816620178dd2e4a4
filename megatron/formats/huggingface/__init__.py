"""Hugging Face models. Each supported architecture is one table, which is used for both import and
export. To add an architecture, write its file and name it in this module, or in its feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.config.features import features
from megatron.config.flags import flag_of
from megatron.formats import LINEAR, LinearTarget, layer_names
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.classic import CLASSIC
from megatron.formats.huggingface.decoders import DECODERS
from megatron.formats.huggingface.entries import (
    GATE_AND_UP,
    GROUPED_QKV,
    INTERLEAVED,
    INTERLEAVED_QKV,
    SAME,
    SEPARATE_KV,
    SEPARATE_QKV,
    Entry,
    Reordering,
)
from megatron.formats.huggingface.layer_norm_decoders import BLOOM, FALCON, GPT2, GPT_NEOX, OPT
from megatron.formats.huggingface.llama import GEMMA2, GEMMA3, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3

_OF_CORE: tuple[Architecture, ...] = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, GPT_NEOX, OPT, FALCON, BLOOM,
)  # fmt: skip


@cache
def architectures() -> tuple[Architecture, ...]:
    """Return the supported architectures: plainer ones first, and those of features last. A model
    that fits several architectures is exported as the first."""
    of_features = (form for each in features().values() for form in each.architectures())
    return (*_OF_CORE, *CLASSIC, *DECODERS, *of_features)


REASONS = {
    "gemma3n": "hidden states are four streams (AltUp), which no flag describes",
    "gemma3n_text": "hidden states are four streams (AltUp), which no flag describes",
    "ctrl": "its sinusoidal positions have other frequencies than --position-embedding-type gives",
    "openai-gpt": "nothing is normalised before the first attention",
    "gpt_neox_japanese": "the last block alone has a bias in attention",
    "xlnet": "attention has two streams of hidden states and biases of relative positions",
    "RefinedWeb": "the name of Falcon before transformers knew it; write falcon",
    "RefinedWebModel": "the name of Falcon before transformers knew it; write falcon",
    "deepseek_v2": "keys and values are computed from latents (MLA)",
    "deepseek_v3": "keys and values are computed from latents (MLA)",
    "kimi_k2": "keys and values are computed from latents (MLA)",
    "paligemma": "its text model sees both sides of a prompt, and one side of an answer",
}
"""Why architectures that resemble supported ones are not supported, by ``model_type``."""


def architecture_of(model: ModelConfig, wanted: str | None = None) -> Architecture:
    """Return the architecture as which a model is exported: the ``model_type`` ``wanted`` if given,
    else the architecture from which the weights were read, else the plainest that fits. Raises
    ValueError if it does not fit. The message names the flags that the model would need."""
    if model.shaping().get("retro_add_retriever"):
        raise ValueError(
            "a model with --retro-add-retriever reads neighbours, which no architecture of Hugging "
            "Face does: keep its checkpoint, or train without that flag"
        )
    origin = _find(model.hf_architecture)
    if wanted is None and origin is not None and not origin.misfits(model):
        return origin
    family = [form for form in architectures() if form.family == model.family]
    known: Sequence[Architecture] = (_named(wanted),) if wanted else family or architectures()
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
    nearest = sorted(misfits.items(), key=lambda item: _distance(item[1]))[:4]
    shown = "; ".join(f"{title} needs {', '.join(lacks)}" for title, lacks in nearest)
    raise ValueError(
        f"a model with {_shape(model)} fits none of the {len(known)} architectures of Hugging Face "
        f"that are known (docs/reference/huggingface-models.md). The nearest: {shown}"
    )


def _distance(needs: Sequence[str]) -> tuple[bool, int]:
    """Return a sort key for an architecture's unmet requirements. Architectures that need no change
    of ``--num-experts`` come first, then those with fewer requirements."""
    return any("--num-experts" in need for need in needs), len(needs)


def departure(model: ModelConfig) -> str | None:
    """Return why a model no longer fits the architecture from which its weights were read. Return
    None if it still fits, or if they were not read from one."""
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
    """Return the architecture named in ``content``, the config.json at ``path``. Raises
    CheckpointError if its ``model_type`` is not supported, or if the weights are packed by MLX."""
    if isinstance(packing := content.get("quantization"), dict):
        raise CheckpointError(
            f"{path}: quantization is {packing!r:.100}: the weights are packed by MLX, which is "
            "not read here: give the model that they were made from, or write them again by "
            "python -m mlx_lm convert --dequantize"
        )
    name = content.get("model_type")
    if known := _find(name):
        return known
    reason = f" ({REASONS[name]})" if isinstance(name, str) and name in REASONS else ""
    inner = content.get("text_config")
    if not reason and isinstance(inner, dict) and (within := _find(inner.get("model_type"))):
        reason = f" (with a text model of {within.title}, whose own folders alone are read)"
    raise CheckpointError(
        f"{path}: model_type is {name!r:.100}{reason}; expected one of "
        f"{', '.join(known.model_type for known in architectures())}"
    )


def _find(model_type: str | None) -> Architecture | None:
    named = ((known, (known.model_type, *known.other_types)) for known in architectures())
    return next((known for known, types in named if model_type in types), None)


def _named(wanted: str) -> Architecture:
    if known := _find(wanted):
        return known
    raise ValueError(
        f"--architecture {wanted} is unknown; expected one of "
        f"{', '.join(known.model_type for known in architectures())}"
    )


def _shape(model: ModelConfig) -> str:
    """Return the model flags that distinguish architectures, as command-line text for a message."""
    flags, words = model.flags(), []
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        told = field.metadata["role"] and not field.metadata["internal"]
        if told and (field.name in _ALWAYS or value != field.default):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(flag_of(field) if isinstance(value, bool) else f"{flag_of(field)} {shown}")
    return " ".join(words)


_ALWAYS = ("position_embedding_type", "normalization")
"""Fields shown in messages even if they have their default value."""


_MATRICES = {
    SEPARATE_QKV.name: ("q", "k", "v"),
    INTERLEAVED_QKV.name: ("q", "k", "v"),
    SEPARATE_KV.name: ("k", "v"),
    GATE_AND_UP.name: ("gate", "up"),
}


_LINEAR = (
    *LINEAR, "mlp.shared.up", "mlp.shared.down", "mlp.shared_gate", "attention.q",
    "attention.q_down", "attention.q_up", "attention.kv_down", "attention.kv_up",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModuleTarget(LinearTarget):
    """A linear module of a Hugging Face model, or a parameter that stacks several matrices.

    Attributes:
        form: order in which the module stores the rows of a whole layer.
        stacked: True if ``module`` is not a linear module but a parameter of stacked matrices
            [E, O, I], or of their transposes.
    """

    form: Reordering
    model: ModelConfig
    stacked: bool = False

    def rows_to_hf(self, values: Tensor) -> Tensor:
        """Reorder the rows of ``values`` from our weight's order to the module's. The shape is [O,
        ...] or [E, O, r]."""
        (values,) = self.form.to_hf(values, self.model)
        return (values.mT if self._transposed else values).contiguous()

    def rows_from_hf(self, values: Tensor) -> Tensor:
        """Invert :meth:`rows_to_hf`."""
        values = values.mT if self._transposed else values
        return self.form.from_hf([values], self.model).contiguous()

    @property
    def _transposed(self) -> bool:
        return self.stacked and self.form is not SAME


def linear_targets(model: ModelConfig) -> tuple[ModuleTarget, ...]:
    """Return the linear modules of all blocks, in block order, for the architecture as which a
    model would be exported. If no architecture fits, return our own layers under our names."""
    try:
        entries = architecture_of(model).entries
    except ValueError:
        return tuple(
            ModuleTarget(name, "", (), name, form=SAME, model=model) for name in layer_names()
        )
    return tuple(
        target for entry in entries if entry.when(model) for target in _targets_of(entry, model)
    )


def _targets_of(entry: Entry, model: ModelConfig) -> Iterator[ModuleTarget]:
    layer, _, kind = entry.ours.rpartition(".")
    if entry.parameter:
        form = entry.others[0].form if entry.others else entry.form
        yield ModuleTarget(layer, "", (), entry.parameter, form=form, model=model, stacked=True)
    if kind != "weight" or layer.partition(".{n}.")[2] not in _LINEAR:
        return
    names = [name.removesuffix(".weight") for name in entry.theirs]
    if entry.form.modules is not None:
        start = 0
        for (part, parts, count, form), name in zip(entry.form.modules(model), names, strict=True):
            rows, start = (start, start + count), start + count
            yield ModuleTarget(layer, part, parts, name, rows, form=form, model=model)
        return
    matrices = _MATRICES.get(entry.form.name, ("",))
    # Adapters depend only on the order of rows, so a form that keeps this order counts as SAME.
    reorders = entry.form is GROUPED_QKV or entry.form.of_rows
    forms = [entry.form if reorders else SAME] * len(matrices)
    if entry.form is INTERLEAVED_QKV:
        forms = [INTERLEAVED, INTERLEAVED, SAME]
    for index, (part, name, form) in enumerate(zip(matrices, names, forms, strict=True)):
        places = (index,) if part else ()
        yield ModuleTarget(layer, part, places, name, form=form, model=model)
