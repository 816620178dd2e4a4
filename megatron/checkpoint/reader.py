"""Reads a checkpoint of this project's own format: any part of any parameter, whatever layout
wrote it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.contents import check_index
from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.folder import complete_tags, find, manifest, verify
from megatron.checkpoint.index import Piece
from megatron.checkpoint.region import Region
from megatron.checkpoint.source import Source
from megatron.config import ConfigError, ModelConfig, RunConfig, TokenizerConfig


def tensor_key(name: str, kind: str, part: str = "") -> str:
    """Key of a parameter's weights or of one of its moments in a safetensors file.

    Args:
        name: canonical name of the parameter.
        kind: ``weight`` or the name of a moment.
        part: see :class:`Piece`.
    """
    words = (name, part, "" if kind == "weight" else kind)
    return ".".join(word for word in words if word)


class CheckpointReader(Source):
    """One checkpoint of the project's own format.

    Args:
        folder: the checkpoint's folder (``.../global_step100``).

    Attributes:
        config: configuration of the run that wrote it.
        pieces: where each parameter is stored, by canonical name.

    Raises:
        CheckpointError: a file is missing or malformed.
    """

    title = "checkpoint of this project"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = manifest(folder)
        self.state = read_json(folder / "state.json")
        self.config = _configuration(folder)
        self.run, self.model = self.config, self.config.model
        self.tokenizer = self._tokenizer()
        self.pieces = check_index(folder, self.files)
        self._open: dict[str, Any] = {}

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """See :meth:`Source.locate`."""
        if not (path / "manifest.json").is_file() and not (path.is_dir() and complete_tags(path)):
            return None
        return find(str(path), wanted)

    @classmethod
    def family(cls, folder: Path) -> str:
        """See :meth:`Source.family`."""
        return _configuration(folder).model.family

    @classmethod
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        """See :meth:`Source.verify`."""
        verify(folder, share, shares)

    @classmethod
    def newest(cls, load: str, wanted: str | None = None) -> CheckpointReader:
        """Opens the checkpoint that :func:`find` finds.

        Raises:
            CheckpointError: there is none.
        """
        folder = find(load, wanted)
        if folder is None:
            raise CheckpointError(f"{load}: there is no complete checkpoint")
        return cls(folder)

    def names(self) -> Sequence[str]:
        """See :meth:`Source.names`."""
        return list(self.pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :meth:`Source.shape`."""
        return self._pieces_of(name)[0].shape

    def kinds(self, name: str) -> list[str]:
        """``weight`` and the moments that are stored of a parameter."""
        return list(self._pieces_of(name)[0].files)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """See :meth:`Source.tensor`."""
        shape = self.shape(name)
        return self.read(name, kind, Region.whole(shape)).view(shape)

    def read(self, name: str, kind: str, region: Region) -> Tensor:
        """See :meth:`Source.read`; only the rows that the region needs are read."""
        pieces = self._pieces_of(name)
        if pieces[0].shape != region.shape:
            raise CheckpointError(
                f"{self.folder}: {name} has the shape {pieces[0].shape}, the model needs "
                f"{region.shape}"
            )
        flat, found = torch.empty(region.numel), 0
        for piece in pieces:
            overlaps = list(region.overlaps(piece))
            if not overlaps:
                continue
            first = min(overlap.there for overlap in overlaps)
            end = max(overlap.end_there() for overlap in overlaps)
            stored = self._stored(name, kind, piece, first, end)
            for overlap in overlaps:
                overlap.copy(flat, stored, first)
                found += math.prod(overlap.shape)
        if found != region.numel:
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} has {found} of {region.numel} elements"
            )
        return flat

    def copy_tokenizer(self, target: Path) -> bool:
        """See :meth:`Source.copy_tokenizer`."""
        found = (self.folder / "tokenizer").is_dir()
        if found:
            shutil.copytree(self.folder / "tokenizer", target)
        return found

    def _tokenizer(self) -> TokenizerConfig | None:
        if self.config.tokenizer.tokenizer_type is not None:
            return self.config.tokenizer
        own = self.folder / "tokenizer"
        if not own.is_dir():
            return None
        return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(own))

    def _pieces_of(self, name: str) -> list[Piece]:
        pieces = self.pieces.get(name)
        if not pieces:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return pieces

    def _stored(self, name: str, kind: str, piece: Piece, first: int, end: int) -> Tensor:
        """Elements [first, end) of a piece."""
        file = piece.files.get(kind)
        if file is None:
            raise CheckpointError(f"{self.folder} has no {kind} of {name}")
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            stored = self._open[file].get_slice(tensor_key(name, kind, piece.part))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        shape = stored.get_shape()
        if math.prod(shape) != piece.numel:
            raise CheckpointError(f"{path}: {kind} of {name} has {math.prod(shape)} elements")
        width = math.prod(shape[1:])
        top = first // width
        rows = stored[top : -(-end // width)].reshape(-1)
        return rows[first - top * width : end - top * width]


def _configuration(folder: Path) -> RunConfig:
    try:
        return RunConfig.from_dict(read_json(folder / "config.json"))
    except (TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{folder / 'config.json'} is no configuration: {error}") from None


def differences(saved: ModelConfig, wanted: ModelConfig) -> list[str]:
    """Values that shape the weights and differ between two models, a line each."""
    lines, here = [], wanted.shaping()
    for name, old in saved.shaping().items():
        new = here.get(name, old)
        if old != new:
            lines.append(f"{name} is {json.dumps(old)} there and {json.dumps(new)} here")
    return lines
