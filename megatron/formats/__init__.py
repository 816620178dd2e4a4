"""Other programs' checkpoint formats: a package or module for each, and conversion between them.

Only the tables in this file name their modules, each of which is imported when needed. A format
becomes unavailable if a package that it needs is deleted.
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
    # Tried after its original's format, since a universal checkpoint may be an outdated copy.
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
"""Reader of each format, followed by the packages that it needs in addition to its own."""
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
    """Return the formats whose packages are all present."""
    return tuple(form for form in forms if all(map(find_spec, form.needs)))


FORMATS = available(_format(name, *row) for name, row in _READERS.items())
"""Formats that :mod:`megatron.checkpoint.source` tries, in this order, after this project's own."""

COMMANDS = {name: _imported(function) for name, function in _COMMANDS.items()}
"""Commands of ``tools/convert_checkpoint.py``, each with a function that imports its
implementation. Features add further commands."""


def unread_content(path: Path) -> str | None:
    """Return the name of the unsupported format that the files at a path have, with advice. Return
    None if there are no weights in any known format."""
    content: str | None = _imported("unreadable:unreadable")()(path)
    return content


def read_generation(folder: Path, rows: int) -> dict[str, Any]:
    """Return the generation settings in a tokenizer's folder, for a model with ``rows`` tokens.
    Return an empty dictionary if the folder has none. Raises CheckpointError if they are
    malformed."""
    settings: dict[str, Any] = _imported("generation_settings:read_generation")()(folder, rows)
    return settings


LINEAR = (
    "attention.qkv", "attention.proj", "attention.in_proj", "attention.out_proj",
    "cross_attention.q", "cross_attention.kv", "cross_attention.proj", "mlp.up", "mlp.down",
)  # fmt: skip
"""Names of the linear layers that a block may have."""


@dataclass(frozen=True)
class LinearTarget:
    """Linear module to which an adapter can be attached: a layer of a block, or one of the matrices
    that are fused in a layer. In names, ``{n}`` stands for the block's index.

    Attributes:
        layer: canonical name of the layer, such as ``layers.{n}.attention.qkv``.
        part: name of the matrix, such as ``q``; empty if the module is the whole layer.
        parts: indices of the matrix among the fused ones; empty if the module is the whole layer.
        module: name in another program, such as ``model.layers.{n}.self_attn.q_proj``, or the
            layer's.
        rows: first row of the matrix in the fused weight, and the row after its last one; None if
            they follow from ``part``.
    """

    layer: str
    part: str
    parts: tuple[int, ...]
    module: str
    rows: tuple[int, int] | None = None


def layer_names() -> list[str]:
    """Return the names of the linear layers in all stacks of blocks that a model can have."""
    stacks = ("layers", "encoder.layers", "decoder.layers")
    return [f"{stack}.{{n}}.{layer}" for stack in stacks for layer in LINEAR]


def linear_targets(model: ModelConfig) -> Sequence[LinearTarget]:
    """Return the linear modules of a model's blocks, with their Hugging Face names. If that format
    is deleted, the names are this project's."""
    if find_spec(_PACKAGE + "huggingface") is None:
        return [LinearTarget(name, "", (), name) for name in layer_names()]
    targets: Sequence[LinearTarget] = resolve_name(_PACKAGE + "huggingface:linear_targets")(model)
    return targets
