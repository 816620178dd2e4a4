"""Reader for this project's checkpoints: any slice of any parameter, regardless of saved layout."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.folder import find, may_be_ours
from megatron.checkpoint.manifest import (
    BASE,
    CONFIG,
    STATE,
    IndexEntry,
    manifest,
    read_index,
    tensor_key,
    verify,
)
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import Source, tokenizer_in
from megatron.config import ConfigError, ModelConfig, RunConfig, TokenizerConfig
from megatron.config.flags import names_of
from megatron.util.phases import moved


class CheckpointReader(Source):
    """Checkpoint in this project's format. ``index`` maps each parameter's name to its slices."""

    title = "checkpoint of this project"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = manifest(folder)
        self.state = read_json(folder / STATE)
        self.config = _configuration(folder)
        self.run, self.model = self.config, self.config.model
        self.tokenizer = self._tokenizer()
        self.index = read_index(folder, self.files)
        self._open: dict[str, Any] = {}
        self._weights = "weight"

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        if not may_be_ours(path):
            return None
        place = find(str(path), wanted)
        # A checkpoint of adapters is not a model by itself. It has its own reader.
        return None if place is not None and (place / BASE).is_file() else place

    @classmethod
    def family(cls, folder: Path) -> str:
        return _configuration(folder).model.family

    @classmethod
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        verify(folder, share, shares)

    def names(self) -> Sequence[str]:
        return list(self.index)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries(name)[0].slice.shape

    def kinds(self, name: str) -> list[str]:
        return ["weight"] if self._weights != "weight" else list(self._entries(name)[0].files)

    def read_as_weights(self, kind: str) -> None:
        if not any(kind in self.kinds(name) for name in self.index):
            super().read_as_weights(kind)
        self._weights = kind

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        shape = self.shape(name)
        return self.read(name, kind, Slice.whole(shape)).view(shape)

    def read(self, name: str, kind: str, wanted: Slice) -> Tensor:
        """Read a slice of a parameter. Only the stored rows that overlap it are loaded."""
        moved()
        if self.shape(name) != wanted.shape:
            raise CheckpointError(
                f"{self.folder}: {name} has the shape {self.shape(name)}, the model needs "
                f"{wanted.shape}"
            )
        flat, covered = torch.empty(wanted.numel), 0
        for entry in self._entries(name):
            common = wanted.overlap(entry.slice)
            if common is not None:
                common.copy(flat, self._stored(name, kind, entry, common.first, common.end))
                covered += common.numel
        if covered != wanted.numel:
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} has {covered} of {wanted.numel} elements"
            )
        return flat

    def check_tensors(self) -> None:
        """Check each tensor's size and dtype in the files' headers, without reading elements."""
        wanted: dict[str, dict[str, int]] = {}
        for name, entries in self.index.items():
            for entry in entries:
                for kind, file in entry.files.items():
                    key = tensor_key(name, kind, entry.part)
                    wanted.setdefault(file, {})[key] = entry.slice.numel
        for file, tensors in wanted.items():
            path = self.folder / file
            try:
                with safe_open(path, framework="np") as stored:
                    for key in sorted(tensors.keys() - set(stored.keys())):
                        raise CheckpointError(f"{path} has no tensor {key}")
                    for key, numel in tensors.items():
                        _check_tensor(path, key, stored.get_slice(key), numel)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: {error}") from None

    def _tokenizer(self) -> TokenizerConfig | None:
        if self.config.tokenizer.tokenizer_type is not None:
            return self.config.tokenizer
        own = tokenizer_in(self.folder)
        if own is None:
            return None
        return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(own))

    def _entries(self, name: str) -> list[IndexEntry]:
        entries = self.index.get(name)
        if not entries:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return entries

    def _stored(self, name: str, kind: str, entry: IndexEntry, first: int, end: int) -> Tensor:
        if kind == "weight" and self._weights in entry.files:  # buffers have no averages
            kind = self._weights
        file = entry.files.get(kind)
        if file is None:
            raise CheckpointError(f"{self.folder} has no {kind} of {name}")
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            stored = self._open[file].get_slice(tensor_key(name, kind, entry.part))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        shape = stored.get_shape()
        if math.prod(shape) != entry.slice.numel:
            raise CheckpointError(f"{path}: {kind} of {name} has {math.prod(shape)} elements")
        width = math.prod(shape[1:])
        top = first // width
        rows = stored[top : -(-end // width)].reshape(-1)
        return rows[first - top * width : end - top * width]


def _configuration(folder: Path) -> RunConfig:
    try:
        return RunConfig.from_dict(read_json(folder / CONFIG, non_finite=True))
    except (TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{folder / CONFIG} is not a configuration: {error}") from None


def _check_tensor(path: Path, key: str, stored: Any, numel: int) -> None:
    count, dtype = math.prod(stored.get_shape()), stored.get_dtype()
    if count != numel:
        raise CheckpointError(f"{path}: {key} has {count} elements, the index says {numel}")
    if dtype != "F32":
        raise CheckpointError(f"{path}: {key} is {dtype}, not F32")


def differences(saved: ModelConfig, wanted: ModelConfig) -> list[str]:
    """Return a message for each setting that determines weights and differs between two models."""
    lines, there, here = [], saved.shaping(), wanted.shaping()
    # Features may add to a checkpoint's blocks, but features with another mixer replace them.
    replacing = {
        name: getattr(type(part), name)
        for part in (*saved.parts, *wanted.parts)
        if not part.idle and part.replaces_layers
        for name in names_of("weights", type(part))
    }
    for name in {**there, **replacing}:
        old = there.get(name, replacing.get(name))
        new = here.get(name, replacing.get(name, old))
        if old != new:
            lines.append(
                f"{name} is {json.dumps(old)} in the checkpoint and {json.dumps(new)} in this run"
            )
    return lines
