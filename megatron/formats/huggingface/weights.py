"""The tensors of a folder of Hugging Face, by name: safetensors or torch.save, one file or several
with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.formats.unpickle import load_pickle

FORMS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files that hold the tensors or say where they are, in the order in which transformers looks."""


def weights_of(folder: Path) -> Path | None:
    """The first of :data:`FORMS` that a folder has."""
    return next((folder / name for name in FORMS if (folder / name).is_file()), None)


class WeightFiles:
    """Reads single tensors; nothing stays in memory.

    Args:
        folder: with one of :data:`FORMS`.

    Attributes:
        path: that file.
        files: path of the file that holds each tensor, by the tensor's name.

    Raises:
        CheckpointError: there are no such files, or one is damaged or not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        path = weights_of(folder)
        if path is None:
            raise CheckpointError(f"{folder} has none of {', '.join(FORMS)}")
        self.path = path
        self._open: dict[Path, Any] = {}
        if not path.name.endswith(".json"):
            self.files = dict.fromkeys(self._names(path), path)
            return
        self.files = _indexed(path)
        self.files |= {
            name: file
            for file in sorted(set(self.files.values()))
            for name in self._check(file)
            if name not in self.files
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; it is not read."""
        path = self.files[name]
        handle = self._handle(path)
        if isinstance(handle, dict):
            return tuple(handle[name].shape)
        return tuple(handle.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A tensor, in the number format of the file."""
        path = self.files[name]
        handle = self._handle(path)
        try:
            return handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name}: {error}") from None

    def dtype(self, name: str) -> torch.dtype:
        """Number format of a tensor."""
        handle = self._handle(self.files[name])
        if isinstance(handle, dict):
            return handle[name].dtype
        return handle.get_slice(name)[:0].dtype

    def _check(self, file: Path) -> list[str]:
        """Names of the tensors that a file holds; all that the index says must be among them."""
        held = self._names(file)
        missing = {name for name, place in self.files.items() if place == file} - set(held)
        if missing:
            raise CheckpointError(
                f"{file} lacks {', '.join(sorted(missing)[:5])}, which {self.path.name} says it has"
            )
        return held

    def _names(self, path: Path) -> list[str]:
        return list(self._handle(path).keys())

    def _handle(self, path: Path) -> Any:
        """An open safetensors file, or the tensors of a pickle, mapped into memory by name."""
        if path not in self._open:
            if path.suffix == ".safetensors":
                try:
                    self._open[path] = safe_open(path, framework="pt")
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{path}: {error}") from None
            else:
                self._open[path] = _tensors(path)
        return self._open[path]


def _indexed(path: Path) -> dict[str, Path]:
    content = read_json(path)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{path} has no weight_map from names to files")
    for file in sorted(set(found.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is no file of this folder")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path.parent / file} is missing; {path.name} names it")
    return {name: path.parent / file for name, file in found.items()}


def _tensors(path: Path) -> dict[str, Tensor]:
    content = load_pickle(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name!r} is {type(value).__name__}, not a tensor")
    return {name: value.detach() for name, value in content.items()}
