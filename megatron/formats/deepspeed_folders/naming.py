"""Which of a folder's parameters make up each canonical one, and how.

A folder has its own names for parameters: canonical ones, those of an engine's layer list, or those
of another trainer. A naming says what they are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.formats.deepspeed_folders.parameters import layers_of, parameters_of
from megatron.parallel.shard import Shard


class Naming(ABC):
    """The names of one folder.

    Args:
        model: the network.

    Attributes:
        shapes: shape of every parameter without padding, by canonical name.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.registered = parameters_of(model)
        self.shapes = {
            name: parts[0].shard.canonical_shape for name, parts in self.registered.items()
        }

    @abstractmethod
    def parts(self, name: str) -> Sequence[str]:
        """The folder's names of what makes up a canonical parameter."""

    @abstractmethod
    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """A canonical parameter from its parts, each whole, in any shape and with any padding."""

    def shard(self, name: str) -> Shard:
        """How a whole parameter is cut."""
        return self.registered[name][0].shard

    def trim(self, name: str, values: Tensor) -> Tensor:
        """The canonical shape of a parameter, from any that has at least its rows.

        Raises:
            CheckpointError: it cannot have that shape.
        """
        shape = self.shapes[name]
        rows, rest = divmod(values.numel(), math.prod(shape[1:]))
        padded = shape != self.shard(name).full_shape
        if rest or rows < shape[0] or (rows > shape[0] and not padded):
            raise CheckpointError(
                f"{name} is {tuple(values.shape)} there, and {shape} by the configuration"
            )
        return values.reshape(rows, *shape[1:])[: shape[0]]


class CanonicalNaming(Naming):
    """A folder with canonical names."""

    def parts(self, name: str) -> Sequence[str]:
        """See :meth:`Naming.parts`."""
        return [name]

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """See :meth:`Naming.whole`."""
        return self.trim(name, parts[0])


class RankNaming(Naming):
    """The names of a folder in which each rank's share lies by itself."""

    @abstractmethod
    def join(self, name: str, kind: str, shares: Sequence[Sequence[Tensor]]) -> Tensor:
        """A canonical parameter from each part's shares, in the order of the ranks."""

    def registered_name(self, place: int, rest: str) -> str:
        """The name of a parameter of the layer at a place of a pipeline's list."""
        return f"{place}.{rest}"


class EngineNaming(RankNaming):
    """A folder with the names of this project's engines.

    Args:
        model: the network.
        size: tensor-parallel size of the run.
    """

    def __init__(self, model: ModelConfig, size: int) -> None:
        super().__init__(model)
        self.size, self.held = size, parameters_of(model, size)
        self._tied = {
            place: f"tied_modules.{layer.tied_key}"
            for place, layer in enumerate(layers_of(model))
            if layer.tied_key
        }

    def parts(self, name: str) -> Sequence[str]:
        """See :meth:`Naming.parts`."""
        return [part.name for part in self.held[name]]

    def registered_name(self, place: int, rest: str) -> str:
        """See :meth:`RankNaming.registered_name`."""
        return f"{self._tied.get(place, place)}.{rest}"

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """See :meth:`Naming.whole`."""
        if len(parts) == 1:
            return self.trim(name, parts[0])
        return self.trim(name, torch.cat([part.reshape(-1) for part in parts]))

    def join(self, name: str, kind: str, shares: Sequence[Sequence[Tensor]]) -> Tensor:
        """See :meth:`RankNaming.join`."""
        canonical = torch.zeros(self.shapes[name])
        for part, ranks in zip(self.held[name], shares, strict=True):
            for rank, share in enumerate(ranks):
                place = {"tensor": (rank, self.size)}
                shape = part.shard.local_shape(place)
                if share.numel() != torch.Size(shape).numel():
                    raise CheckpointError(
                        f"{part.name} is {tuple(share.shape)} on tensor-parallel rank {rank}, and "
                        f"{shape} by the configuration"
                    )
                part.shard.place(canonical, share.reshape(shape).float(), place)
        return canonical


def looks_canonical(names: Iterable[str]) -> bool:
    """Whether a folder's names are canonical ones."""
    return any(name.startswith("layers.") for name in names)
