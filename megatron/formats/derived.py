"""Checkpoint sources that are computed from other checkpoints and have no folder of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import Source


class DerivedSource(Source):
    """Source whose weights are computed from another checkpoint's."""

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape)

    def kinds(self, name: str) -> Sequence[str]:
        return ("weight",)


class RenamedSource(DerivedSource):
    """Source that presents the weights of the checkpoint ``original`` under other names."""

    original: Source

    @abstractmethod
    def original_name(self, name: str) -> str:
        """Return the original checkpoint's name for a parameter."""

    def shape(self, name: str) -> tuple[int, ...]:
        return self.original.shape(self.original_name(name))

    def dtype(self, name: str, kind: str = "weight") -> str:
        return self.original.dtype(self.original_name(name), kind)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        return self.original.tensor(self.original_name(name), kind)

    def read(self, name: str, kind: str, wanted: Slice) -> Tensor:
        return self.original.read(self.original_name(name), kind, wanted)
