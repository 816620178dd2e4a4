"""Checkpoints of other programs: a package or module for each format, and conversion between them.

This table is the only place that names their modules, each of which is imported when it is needed.
A format is left out where a package that it needs is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from megatron.checkpoint.source import Format

_MEGATRON = "megatron.formats.legacy_megatron"
_DEEPSPEED = "megatron.formats.deepspeed_folders"
_HUGGINGFACE = "megatron.formats.huggingface"

_TABLE = (
    Format(
        "deepspeed",
        reader="megatron.formats.deepspeed_folders.folder:DeepSpeedFolder",
        needs=(_DEEPSPEED, _MEGATRON),
    ),
    Format(  # a copy, which may be older than its original
        "universal",
        reader="megatron.formats.deepspeed_folders.universal:UniversalFolder",
        writer="megatron.formats.deepspeed_folders.universal:save_universal",
        needs=(_DEEPSPEED, _MEGATRON),
    ),
    Format(
        "legacy_megatron",
        reader="megatron.formats.legacy_megatron.reader:MegatronCheckpoint",
        needs=(_MEGATRON,),
    ),
    Format(
        "huggingface",
        reader="megatron.formats.huggingface.source:HuggingFaceFolder",
        needs=(_HUGGINGFACE,),
    ),
    Format(
        "peft",
        reader="megatron.formats.huggingface.peft:PeftFolder",
        needs=(_HUGGINGFACE,),
    ),
    Format(
        "meta",
        reader="megatron.formats.meta:MetaFolder",
        needs=("megatron.formats.meta", _HUGGINGFACE, _MEGATRON),
    ),
)


def available(forms: Iterable[Format]) -> tuple[Format, ...]:
    """The formats whose packages are there."""
    return tuple(form for form in forms if all(map(find_spec, form.needs)))


FORMATS = available(_TABLE)
"""The formats that :mod:`megatron.checkpoint.source` tries after this project's, in this order."""

COMMANDS = {
    "to-hf": "megatron.formats.conversion.commands:to_hf",
    "from-hf": "megatron.formats.conversion.commands:from_hf",
    "to-megatron": "megatron.formats.conversion.commands:to_megatron",
    "to-universal": "megatron.formats.conversion.commands:to_universal",
    "to-peft": "megatron.formats.conversion.commands:to_peft",
}
"""The commands of ``tools/convert_checkpoint.py``, each a function of the command line."""


def linear_targets(model: Any) -> Any:
    """The linear modules of the blocks of a :class:`ModelConfig` by their Hugging Face names, for
    ``--lora-targets``; None where that format is deleted."""
    if find_spec(_HUGGINGFACE) is None:
        return None
    return resolve_name("megatron.formats.huggingface:linear_targets")(model)
