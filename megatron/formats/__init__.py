"""Checkpoints of other programs: a package or module for each format, and conversion between them.

This table is the only place that names their modules, each of which is imported when it is needed.
A format is unavailable if a package that it needs is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.checkpoint.source import Format
from megatron.config import ModelConfig

_PACKAGE = "megatron.formats."
_READERS: dict[str, tuple[str, ...]] = {
    "deepspeed": ("deepspeed_folders.folder:DeepSpeedFolder", "legacy_megatron"),
    "trainer_zero": (
        "trainers.zero:ZeroFolder", "deepspeed_folders", "huggingface", "legacy_megatron",
    ),
    # A copy, which may be older than its original.
    "universal": ("deepspeed_folders.universal:UniversalFolder", "legacy_megatron"),
    "legacy_megatron": ("legacy_megatron.reader:MegatronCheckpoint",),
    "torch_dist": ("sharded.megatron_core:CoreFolder", "legacy_megatron"),
    "olmo_core": ("trainers.olmo_core:OlmoCoreFolder", "sharded", "huggingface"),
    "nanotron": ("trainers.nanotron:NanotronFolder", "huggingface"),
    "dcp": ("trainers.dcp:DcpFolder", "sharded", "huggingface"),
    "litgpt": ("trainers.litgpt:LitFolder", "huggingface"),
    "huggingface": ("huggingface.source:HuggingFaceFolder",),
    "meta": ("meta:MetaFolder", "huggingface", "legacy_megatron"),
    "gguf": ("gguf.source:GGUFModel", "huggingface"),
}  # fmt: skip
"""By the name of a format: its reader, and packages that it needs besides its own."""
_WRITERS = {"universal": "deepspeed_folders.universal:save_universal"}
_SAVERS = {"deepspeed": "deepspeed_folders.engine_writer:EngineFolderWriter"}
_COMMANDS = {
    "to-hf": "conversion.commands:to_hf",
    "from-hf": "conversion.commands:from_hf",
    "to-megatron": "conversion.commands:to_megatron",
    "to-deepspeed": "conversion.other_commands:to_deepspeed",
    "to-universal": "conversion.other_commands:to_universal",
    "to-torch-dist": "sharded.writer:to_torch_dist",
    "to-dcp": "sharded.writer:to_dcp",
    "to-gguf": "conversion.other_commands:to_gguf",
}


def _imported(name: str) -> Callable[[], Any]:
    return partial(resolve_name, _PACKAGE + name)


def _format(name: str, reader: str, *needs: str) -> Format:
    own = reader.partition(":")[0].partition(".")[0]
    return Format(
        name,
        reader=_imported(reader),
        writer=_imported(_WRITERS[name]) if name in _WRITERS else None,
        saver=_imported(_SAVERS[name]) if name in _SAVERS else None,
        needs=tuple(_PACKAGE + package for package in (own, *needs)),
    )


def available(forms: Iterable[Format]) -> tuple[Format, ...]:
    """The formats whose packages are there."""
    return tuple(form for form in forms if all(map(find_spec, form.needs)))


FORMATS = available(_format(name, *row) for name, row in _READERS.items())
"""The formats that :mod:`megatron.checkpoint.source` tries after this project's, in this order."""

COMMANDS = {name: _imported(function) for name, function in _COMMANDS.items()}
"""Commands of ``tools/convert_checkpoint.py``: each imports a function of the command line. Those
of features follow."""


def unread_content(path: Path) -> str | None:
    """The format of the files at a path, which none here reads, and what to do; None if there are
    no weights of any kind."""
    content: str | None = _imported("unreadable:unreadable")()(path)
    return content


def read_generation(folder: Path, rows: int) -> dict[str, Any]:
    """Return the generation settings in a tokenizer's folder, for a model with this many tokens;
    empty without them. Raises CheckpointError if they are malformed."""
    settings: dict[str, Any] = _imported("generation_settings:read_generation")()(folder, rows)
    return settings


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
    if find_spec(_PACKAGE + "huggingface") is None:
        return [LinearTarget(name, "", (), name) for name in layer_names()]
    targets: Sequence[LinearTarget] = resolve_name(_PACKAGE + "huggingface:linear_targets")(model)
    return targets
