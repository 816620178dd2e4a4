"""Hugging Face weight files: tensors by name, from safetensors or torch.save, in one file or in
several with an index."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.formats.huggingface.packed import PLAIN, Packing
from megatron.formats.huggingface.packed.form import PackedForm, StoredParts
from megatron.formats.huggingface.within import RenamedTensors, Renaming
from megatron.formats.unpickle import load_pickle
from megatron.formats.unreadable import unreadable

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names of weight files or their index, in the order in which transformers searches for them."""
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_QUANTISED = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32}
"""Dtypes of quantised values, which are weights only together with scales."""


class WeightFiles:
    """Reader of single tensors, none of which stay in memory. A quantised weight counts as one
    tensor. Raises CheckpointError if files are missing, damaged or do not match the index."""

    def __init__(
        self, folder: Path, packing: Packing = PLAIN, renamed: Renaming | None = None
    ) -> None:
        path = weights_of(folder)
        if path is None:
            raise CheckpointError(f"{folder} has {_instead(folder)}")
        self.path, self._renamed = path, renamed
        self._open: dict[Path, Any] = {}
        if path.suffix != ".json":
            self.files = dict.fromkeys(self._handle(path).keys(), path)
        else:
            self._read_index(path)
        self.packed: dict[str, tuple[PackedForm, StoredParts]] = {}
        for form in packing.forms:
            for name, names in form.claim(set(self.files)).items():
                places = {each: self.files.pop(each) for each in names.values()}
                self.files[name] = next(iter(places.values()))
                self.packed[name] = form, self._parts(names, places)
        for name in [each for each in self.files if each.endswith(packing.ignored or ("\0",))]:
            del self.files[name]

    def _parts(self, names: dict[str, str], places: dict[str, Path]) -> StoredParts:
        return StoredParts(
            names,
            lambda name: self._shape(name, places[name]),
            lambda name: self._tensor(name, places[name]),
        )

    def _read_index(self, path: Path) -> None:
        self.files = indexed(path)
        if self._renamed is not None:
            named = {self._renamed(name): place for name, place in self.files.items()}
            self.files = {name: place for name, place in named.items() if name is not None}
        for file in sorted(set(self.files.values())):
            stored = list(self._handle(file).keys())
            missing = {name for name, place in self.files.items() if place == file} - set(stored)
            if missing:
                raise CheckpointError(
                    f"{file} lacks {some(sorted(missing))}, which {path.name} says it has"
                )
            self.files = dict.fromkeys(stored, file) | self.files

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its data."""
        if name not in self.packed:
            return self._shape(name, self.files[name])
        form, parts = self.packed[name]
        try:
            return form.shape(parts)
        except ValueError as error:
            raise self._wrong(name, error) from None

    def _shape(self, name: str, path: Path) -> tuple[int, ...]:
        handle = self._handle(path)
        if isinstance(handle, dict):
            return tuple(handle[name].shape)
        return tuple(handle.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Read a tensor in its file's dtype or, if it is quantised, dequantise it to its form's
        dtype."""
        if name in self.packed:
            form, parts = self.packed[name]
            try:
                return form.unpack(parts)
            except ValueError as error:
                raise self._wrong(name, error) from None
        stored = self._tensor(name, self.files[name])
        if stored.dtype in _QUANTISED:
            size = stored.dtype.itemsize * 8
            missing = ValueError(f"numbers of {size} bits ({stored.dtype}) require scales")
            raise self._wrong(name, missing)
        return stored

    def _wrong(self, name: str, error: ValueError) -> CheckpointError:
        if isinstance(error, CheckpointError):  # It already names the tensor.
            return error
        return CheckpointError(f"{self.files[name]}: {name}: {error}")

    def _tensor(self, name: str, path: Path) -> Tensor:
        handle = self._handle(path)
        try:
            return handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name}: {error}") from None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading its data."""
        if name in self.packed:
            return self.packed[name][0].dtype
        handle = self._handle(self.files[name])
        return (handle[name] if isinstance(handle, dict) else handle.get_slice(name)[:0]).dtype

    def _handle(self, path: Path) -> Any:
        """Return an open safetensors file, or the memory-mapped tensors in a pickle by name."""
        if path not in self._open:
            if path.suffix != ".safetensors":
                self._open[path] = _unpickled(path, self._renamed)
            else:
                try:
                    handle = safe_open(path, framework="pt")
                    named = self._renamed
                    self._open[path] = handle if named is None else RenamedTensors(handle, named)
                except SafetensorError as error:
                    raise CheckpointError(
                        f"{path} is incomplete or no safetensors file: {error}; download or copy "
                        "it again"
                    ) from None
                except OSError as error:
                    raise CheckpointError(f"{path}: {error}") from None
        return self._open[path]


def weights_of(folder: Path) -> Path | None:
    """Return the first of :data:`WEIGHTS` in a folder, or None."""
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def _instead(folder: Path) -> str:
    """Describe what a folder has instead of weights, with advice, for an error message."""
    shards = sorted(path.name for path in folder.glob("*-of-*") if _SHARD.fullmatch(path.name))
    if shards:
        return f"{some(shards)}, but no index of their tensors: download the index file too"
    return unreadable(folder) or f"none of {', '.join(WEIGHTS)}"


def indexed(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, by name, from an index file. Raises CheckpointError if the
    index is malformed or a file is missing."""
    content = read_json(path, lenient=True)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise CheckpointError(f"{path} has no weight_map from names to files")
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not a file of this folder")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path.parent / file} is missing; {path.name} names it")
    return {name: path.parent / file for name, file in weight_map.items()}


def _unpickled(path: Path, renamed: Renaming | None) -> dict[str, Tensor]:
    content = load_pickle(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name!r} is {type(value).__name__}, not a tensor")
    if renamed is not None:
        content = {new: value for name, value in content.items() if (new := renamed(name))}
    return {name: value.detach() for name, value in content.items()}


def some(names: Sequence[str]) -> str:
    """Return the first five names, followed by the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
