"""Keys of DeepSpeed's JSON that DeepSpeed 0.19.7 and 0.19.8 have removed.

DeepSpeed refuses such a key even where it says that the feature is off, as the JSON files of
Megatron-DeepSpeed's scripts do. The trainer leaves the key out if it is off, and refuses it by name
if it is on, with every version of DeepSpeed alike.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from megatron.config import ConfigError

Json = dict[str, Any]

ZERO = "zero_optimization"
CURRICULUM = "curriculum_learning"
"""Removed too; the trainer reads it itself (`megatron/config/kinds/curriculum.py`)."""

_COMPRESSION = "compression_training"
_DTYPES = "weights are trained in the dtype of --bf16 or --fp16"

REMOVED = {
    _COMPRESSION: ("0.19.7", "DeepSpeed 0.19.8 has no compression"),
    "nebula": ("0.19.7", "checkpoints are the trainer's own (--save, --load, --async-save)"),
    "quantize_training": ("0.19.7", _DTYPES),
    "sparse_attention": ("0.19.7", "attention is chosen by --attention-backend, and is dense"),
    "amp": ("0.19.8", "NVIDIA apex is not used; set bf16 or fp16"),
    "eigenvalue": ("0.19.8", f"it served quantize_training; {_DTYPES}"),
    "elasticity": ("0.19.8", "--load reads a checkpoint on any number of processes"),
    "graph_harvesting": (
        "0.19.8",
        "CUDA graphs are recorded by --torch-compile-mode reduce-overhead",
    ),
    "progressive_layer_drop": ("0.19.8", "every layer takes part in every step"),
    "sparse_gradients": ("0.19.8", "gradients of embeddings are dense"),
    f"{ZERO}.mics_shard_size": (
        "0.19.7",
        f"{ZERO}.zero_hpz_partition_size keeps the gathers of the backward pass in a node",
    ),
    f"{ZERO}.mics_hierarchical_params_gather": (
        "0.19.7",
        f"{ZERO}.zero_hpz_partition_size keeps the gathers of the backward pass in a node",
    ),
    f"{ZERO}.zeropp_loco_param": (
        "0.19.8",
        f"{ZERO}.zero_quantized_gradients works without its error feedback",
    ),
}
"""For each key the version of DeepSpeed that removed it, and what there is instead."""


def check_removed(content: Json, path: str) -> None:
    """Raises ConfigError if the JSON at ``path`` has a removed key that is on, or neither on nor
    off."""
    for key, value in _present(content):
        version, instead = REMOVED[key]
        places = list(_switched_on(key, value, path))
        if places:
            raise ConfigError(
                f"{path}: {' and '.join(places)} {'is' if len(places) == 1 else 'are'} on, and "
                f"DeepSpeed removed {key} in {version}: {instead}; remove the key, or switch it off"
            )


def removed_notes(content: Json, path: str) -> list[str]:
    """A line for the user for each removed key that is left out of the JSON at ``path``."""
    notes = [
        f"{path}: {key} is off, and is left out: DeepSpeed refuses the key itself since "
        f"{REMOVED[key][0]}"
        for key, _ in _present(content)
    ]
    if isinstance(content.get(CURRICULUM), dict):
        notes.append(
            f"{path}: {CURRICULUM} is read by the trainer, and is left out for DeepSpeed, which "
            "refuses the key since 0.19.8"
        )
    return notes


def without_removed(content: Json) -> Json:
    """A copy of the JSON without removed keys, but with the trainer's curriculum."""
    result = copy.deepcopy(content)
    for key, _ in _present(content):
        section, _, name = key.rpartition(".")
        del (result[section] if section else result)[name]
    return result


def _present(content: Json) -> Iterator[tuple[str, Any]]:
    for key in REMOVED:
        section, _, name = key.rpartition(".")
        node = content.get(section) if section else content
        if isinstance(node, dict) and name in node:
            yield key, node[name]


def _switched_on(key: str, value: Any, path: str) -> Iterator[str]:
    """The places at which the value of a removed key switches something on."""
    if key == _COMPRESSION and isinstance(value, dict):
        for technique, section in value.items():
            place = f"{key}.{technique}"
            if isinstance(section, dict) and "shared_parameters" in section:
                place, section = f"{place}.shared_parameters", section["shared_parameters"]
            yield from _switched_on(place, section, path)
    elif key == f"{ZERO}.mics_shard_size" and value is not None:
        if type(value) is not int:
            raise ConfigError(f"{path}: {key} is {json.dumps(value)[:200]}; it must be an integer")
        if value > 0:
            yield f"{key} {value}"
    elif isinstance(value, dict) and key in ("sparse_attention", f"{ZERO}.zeropp_loco_param"):
        # Without a switch: on as soon as it says anything.
        if value.get("enabled", bool(value)):
            yield key
    elif isinstance(value, dict):
        yield from _switched_on(f"{key}.enabled", value.get("enabled", False), path)
    elif value not in (None, True, False) or type(value) in (int, float):
        raise ConfigError(f"{path}: {key} is {json.dumps(value)[:200]}; it must be true or false")
    elif value:
        yield key
