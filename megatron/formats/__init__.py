"""Checkpoints of other programs: a package or module for each format, and conversion between them.

This table is the only place that names their modules, each of which is imported when it is needed.
A format is left out where a package that it needs is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from megatron.checkpoint.source import Format
from megatron.config import ModelConfig

_MEGATRON = "megatron.formats.legacy_megatron"
_DEEPSPEED = "megatron.formats.deepspeed_folders"
_TRAINERS = "megatron.formats.trainers"
_SHARDED = "megatron.formats.sharded"
_HUGGINGFACE = "megatron.formats.huggingface"


def _imported(name: str) -> Callable[[], Any]:
    return partial(resolve_name, name)


_TABLE = (
    Format(
        "deepspeed",
        reader=_imported("megatron.formats.deepspeed_folders.folder:DeepSpeedFolder"),
        needs=(_DEEPSPEED, _MEGATRON),
    ),
    Format(
        "trainer_zero",
        reader=_imported("megatron.formats.trainers.zero:ZeroFolder"),
        needs=(_TRAINERS, _DEEPSPEED, _HUGGINGFACE, _MEGATRON),
    ),
    Format(  # a copy, which may be older than its original
        "universal",
        reader=_imported("megatron.formats.deepspeed_folders.universal:UniversalFolder"),
        writer=_imported("megatron.formats.deepspeed_folders.universal:save_universal"),
        needs=(_DEEPSPEED, _MEGATRON),
    ),
    Format(
        "legacy_megatron",
        reader=_imported("megatron.formats.legacy_megatron.reader:MegatronCheckpoint"),
        needs=(_MEGATRON,),
    ),
    Format(
        "torch_dist",
        reader=_imported("megatron.formats.sharded.megatron_core:CoreFolder"),
        needs=(_SHARDED, _MEGATRON),
    ),
    Format(
        "olmo_core",
        reader=_imported("megatron.formats.trainers.olmo_core:OlmoCoreFolder"),
        needs=(_TRAINERS, _SHARDED, _HUGGINGFACE),
    ),
    Format(
        "nanotron",
        reader=_imported("megatron.formats.trainers.nanotron:NanotronFolder"),
        needs=(_TRAINERS, _HUGGINGFACE),
    ),
    Format(
        "dcp",
        reader=_imported("megatron.formats.trainers.dcp:DcpFolder"),
        needs=(_TRAINERS, _SHARDED, _HUGGINGFACE),
    ),
    Format(
        "litgpt",
        reader=_imported("megatron.formats.trainers.litgpt:LitFolder"),
        needs=(_TRAINERS, _HUGGINGFACE),
    ),
    Format(
        "huggingface",
        reader=_imported("megatron.formats.huggingface.source:HuggingFaceFolder"),
        needs=(_HUGGINGFACE,),
    ),
    Format(
        "meta",
        reader=_imported("megatron.formats.meta:MetaFolder"),
        needs=("megatron.formats.meta", _HUGGINGFACE, _MEGATRON),
    ),
    Format(
        "gguf",
        reader=_imported("megatron.formats.gguf.source:GGUFModel"),
        needs=("megatron.formats.gguf", _HUGGINGFACE),
    ),
)


def available(forms: Iterable[Format]) -> tuple[Format, ...]:
    """The formats whose packages are there."""
    return tuple(form for form in forms if all(map(find_spec, form.needs)))


FORMATS = available(_TABLE)
"""The formats that :mod:`megatron.checkpoint.source` tries after this project's, in this order."""

COMMANDS: dict[str, Callable[[], Any]] = {
    "to-hf": _imported("megatron.formats.conversion.commands:to_hf"),
    "from-hf": _imported("megatron.formats.conversion.commands:from_hf"),
    "to-megatron": _imported("megatron.formats.conversion.commands:to_megatron"),
    "to-deepspeed": _imported("megatron.formats.conversion.deepspeed_commands:to_deepspeed"),
    "to-universal": _imported("megatron.formats.conversion.deepspeed_commands:to_universal"),
    "to-torch-dist": _imported("megatron.formats.sharded.export:to_torch_dist"),
    "to-dcp": _imported("megatron.formats.sharded.export:to_dcp"),
    "to-gguf": _imported("megatron.formats.conversion.gguf_command:to_gguf"),
}
"""Commands of ``tools/convert_checkpoint.py``: each imports a function of the command line. Those
of features follow."""

LINEAR = (
    "attention.qkv", "attention.proj", "attention.in_proj", "attention.out_proj",
    "cross_attention.q", "cross_attention.kv", "cross_attention.proj", "mlp.up", "mlp.down",
)  # fmt: skip
"""The linear layers of a block."""


@dataclass(frozen=True)
class LinearTarget:
    """A linear module that can have an adapter: a layer of a block, or one of the matrices that are
    fused in it. Names have ``{n}`` for the number of the block.

    Attributes:
        layer: canonical name of the layer, ``layers.{n}.attention.qkv``.
        part: name of the matrix, ``q``; empty where the module is the whole layer.
        parts: its places among the fused ones; empty where the module is the whole layer.
        module: another program's name, ``model.layers.{n}.self_attn.q_proj``, or the layer's.
        rows: the first of its rows in the weight and the one after the last, where they do not
            follow from ``part``.
    """

    layer: str
    part: str
    parts: tuple[int, ...]
    module: str
    rows: tuple[int, int] | None = None


def layer_names() -> list[str]:
    """The names of the linear layers of all stacks of blocks that a model can have."""
    stacks = ("layers", "encoder.layers", "decoder.layers")
    return [f"{stack}.{{n}}.{layer}" for stack in stacks for layer in LINEAR]


def linear_targets(model: ModelConfig) -> Sequence[LinearTarget]:
    """The linear modules of a model's blocks by their Hugging Face names, or by the layers' where
    that format is deleted."""
    if find_spec(_HUGGINGFACE) is None:
        return [LinearTarget(name, "", (), name) for name in layer_names()]
    targets: Sequence[LinearTarget] = resolve_name("megatron.formats.huggingface:linear_targets")(
        model
    )
    return targets
