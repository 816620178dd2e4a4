"""One rank's file of an old Megatron checkpoint: its parameters by name, and what else it says."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.formats.legacy_megatron.locations import load_rank
from megatron.formats.legacy_megatron.names import is_buffer

VERSIONS = (0.0, 1.0, 2.0, 3.0)
"""Values of ``checkpoint_version``; they differ in the order of query-key-value rows."""


@dataclass(frozen=True)
class RankFile:
    """What a rank's file holds.

    Attributes:
        path: the file.
        version: its ``checkpoint_version``.
        iteration: steps done; None where it does not say (released models).
        arguments: the arguments of the run; empty where there are none.
        chunks: parameters by Megatron's name, levels joined by dots, in the order of registration;
            several dictionaries with virtual pipeline stages.
        optimizer: state of the optimizer, as Megatron nests it; None without one.
    """

    path: Path
    version: float
    iteration: int | None
    arguments: Mapping[str, Any]
    chunks: tuple[Mapping[str, Tensor], ...]
    optimizer: Any

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Reads a file; tensors of a zip file on disk stay there until they are looked at.

        Raises:
            CheckpointError: it is damaged, or not of this format.
        """
        content = load_rank(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds no dictionary")
        return cls(
            path,
            _version(content, path),
            _iteration(content, path),
            _arguments(content, path),
            tuple(_flat(content[key], path) for key in _chunk_keys(content, path)),
            content.get("optimizer"),
        )


def _version(content: Mapping[str, Any], path: Path) -> float:
    version = content.get("checkpoint_version", 0)
    if isinstance(version, bool) or version not in VERSIONS:
        raise CheckpointError(f"{path} has checkpoint_version {version!r}; known are 0, 1, 2 and 3")
    return float(version)


def _iteration(content: Mapping[str, Any], path: Path) -> int | None:
    iteration = content.get("iteration", content.get("total_iters"))
    if iteration is not None and not isinstance(iteration, int):
        raise CheckpointError(f"{path}: iteration is {iteration!r}, not a whole number")
    return iteration


def _arguments(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    arguments = content.get("args")
    if arguments is None:
        return {}
    if not isinstance(arguments, argparse.Namespace):
        raise CheckpointError(f"{path}: args are {type(arguments).__name__}, not a namespace")
    return {name: value for name, value in vars(arguments).items() if not isinstance(value, Tensor)}


def _chunk_keys(content: Mapping[str, Any], path: Path) -> list[str]:
    """``model``, or ``model0``, ``model1``, ... of a rank with several stages."""
    if "model" in content:
        return ["model"]
    numbered = [
        key for key in content if isinstance(key, str) and key.removeprefix("model").isdecimal()
    ]
    keys = [f"model{number}" for number in range(len(numbered))]
    if not keys or set(keys) != set(numbered):
        raise CheckpointError(
            f"{path} has no model, nor model0, model1, ...; it has {', '.join(map(str, content))}"
        )
    return keys


def _flat(nested: Any, path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dictionaries, by the keys on the way to each joined by dots."""
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: {prefix or 'model'} is no dictionary")
    found: dict[str, Tensor] = {}
    for key, value in nested.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: {prefix or 'model'} has the key {key!r}, not a name")
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Tensor):
            if not is_buffer(name):
                found[name] = value.detach()
        elif isinstance(value, dict):
            found |= _flat(value, path, name)
        elif value is not None and not is_buffer(name):
            raise CheckpointError(f"{path}: {name} is {type(value).__name__}, not a tensor")
    return found
