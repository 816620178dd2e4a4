"""Reads a checkpoint of this project's own format: whole parameters, whatever layout wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.folder import find, manifest
from megatron.checkpoint.index import Piece
from megatron.config import RunConfig


def tensor_key(name: str, kind: str, part: str = "") -> str:
    """Key of a parameter's weights or of one of its moments in a safetensors file.

    Args:
        name: canonical name of the parameter.
        kind: ``weight`` or the name of a moment.
        part: see :class:`Piece`.
    """
    words = (name, part, "" if kind == "weight" else kind)
    return ".".join(word for word in words if word)


class CheckpointReader:
    """One checkpoint.

    Args:
        folder: the checkpoint's folder (``.../global_step100``).

    Attributes:
        config: configuration of the run that wrote it.
        state: counters, loss scaler and layout at the time.
        pieces: where each parameter is stored, by canonical name.

    Raises:
        CheckpointError: a file is missing or malformed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = manifest(folder)
        self.config = RunConfig.from_dict(read_json(folder / "config.json"))
        self.state: dict[str, Any] = read_json(folder / "state.json")
        try:
            self.pieces = {
                name: [Piece.from_json(piece) for piece in pieces]
                for name, pieces in read_json(folder / "index.json").items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{folder / 'index.json'} is not an index: {error!r}") from None
        self._open: dict[str, Any] = {}

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

    def kinds(self, name: str) -> list[str]:
        """``weight`` and the moments that are stored of a parameter."""
        return list(self.pieces[name][0].files)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """A whole parameter, or one of its moments, without padding, float32.

        Raises:
            CheckpointError: it is not in the checkpoint, or not all of it.
        """
        pieces = self.pieces.get(name)
        if not pieces:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        whole = torch.empty(pieces[0].shape)
        found = 0
        for share in {(piece.dim, piece.ranges) for piece in pieces}:
            members = [piece for piece in pieces if (piece.dim, piece.ranges) == share]
            flat = torch.empty(members[0].share_shape).view(-1)
            for piece in members:
                flat[piece.start : piece.end] = self._stored(name, kind, piece).reshape(-1)
                found += piece.end - piece.start
            _place(whole, flat.view(members[0].share_shape), members[0])
        if found != whole.numel():
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} has {found} of {whole.numel()} elements"
            )
        return whole

    def _stored(self, name: str, kind: str, piece: Piece) -> Tensor:
        file = piece.files.get(kind)
        if file is None:
            raise CheckpointError(f"{self.folder} has no {kind} of {name}")
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            stored = self._open[file].get_tensor(tensor_key(name, kind, piece.part))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        if stored.numel() != piece.end - piece.start:
            raise CheckpointError(f"{path}: {kind} of {name} has {stored.numel()} elements")
        return stored


def _place(whole: Tensor, share: Tensor, piece: Piece) -> None:
    if piece.dim is None:
        whole.copy_(share)
        return
    taken = 0
    for start, length in piece.ranges:
        whole.narrow(piece.dim, start, length).copy_(share.narrow(piece.dim, taken, length))
        taken += length


def differences(saved: RunConfig, wanted: RunConfig) -> list[str]:
    """Values that shape the weights and differ between two configurations, a line each."""
    shaping = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "position_embedding_type normalization activation add_bias_linear add_qkv_bias "
        "untie_embeddings_and_output_weights unpadded_vocab_size"
    ).split()
    if saved.model.position_embedding_type == "learned_absolute":
        shaping.append("max_position_embeddings")
    lines = []
    for name in shaping:
        old, new = getattr(saved.model, name), getattr(wanted.model, name)
        if old != new:
            lines.append(f"{name} is {json.dumps(old)} there and {json.dumps(new)} here")
    return lines
