"""What a table says: which of our parameters is which of Hugging Face's tensors, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.config import ModelConfig

TensorSource = Callable[[str], Tensor]
"""Gives a tensor by its name."""


def always(model: ModelConfig) -> bool:
    """The condition of an entry that every model has."""
    return True


@dataclass(frozen=True)
class Entry:
    """One kind of parameter in both forms.

    Attributes:
        ours: canonical name, with ``{n}`` for the number of the block.
        theirs: names of the tensors that hold it; several hold its rows one behind the other.
        transposed: they hold the matrix as [inputs, outputs] (GPT-2's Conv1D).
        rows: numbers of rows of each of ``theirs`` where there are several.
        when: whether a model has this parameter.
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    rows: Callable[[ModelConfig], tuple[int, ...]] | None = None
    when: Callable[[ModelConfig], bool] = always

    def __post_init__(self) -> None:
        assert (self.rows is not None) == (len(self.theirs) > 1)
        assert not (self.rows and self.transposed)

    @property
    def repeated(self) -> bool:
        """Whether every block has one."""
        return "{n}" in self.ours


@dataclass(frozen=True)
class Parameter:
    """An entry for one parameter of one model.

    Attributes:
        ours: canonical name.
        theirs: names of the tensors that hold it.
        entry: the line of the table.
        model: shape of the network.
    """

    ours: str
    theirs: tuple[str, ...]
    entry: Entry
    model: ModelConfig

    def to_hf(self, values: Tensor) -> dict[str, Tensor]:
        """Their tensors, from the whole parameter without padding."""
        if self.entry.rows is not None:
            parts = values.split(self.entry.rows(self.model))
        else:
            parts = (values.T if self.entry.transposed else values,)
        return dict(zip(self.theirs, (part.contiguous() for part in parts), strict=True))

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`to_hf`: the whole parameter, from their tensors in order."""
        if self.entry.rows is not None:
            return torch.cat(list(tensors))
        (values,) = tensors
        return values.T.contiguous() if self.entry.transposed else values


@dataclass(frozen=True)
class Requirement:
    """A condition on a configuration.

    Attributes:
        holds: whether a model fulfils it.
        wanted: the flags that do.
    """

    holds: Callable[[ModelConfig], bool]
    wanted: str


@dataclass(frozen=True)
class Architecture:
    """An architecture of `transformers` and how our models map to it.

    Attributes:
        title: what people call it.
        entries: the table.
        requirements: what a configuration must be to fit.
        config: the keys of config.json that describe the network.
    """

    title: str
    entries: tuple[Entry, ...]
    requirements: tuple[Requirement, ...]
    config: Callable[[ModelConfig], dict[str, Any]]

    def misfits(self, model: ModelConfig) -> list[str]:
        """What the configuration would have to be to fit; empty when it fits."""
        return [need.wanted for need in self.requirements if not need.holds(model)]

    def parameters(self, model: ModelConfig) -> Iterator[Parameter]:
        """The table for one model: blocks in order, between what comes before and after them."""
        present = [entry for entry in self.entries if entry.when(model)]
        places = [place for place, entry in enumerate(present) if entry.repeated]
        first, end = places[0], places[-1] + 1
        for entry in present[:first]:
            yield Parameter(entry.ours, entry.theirs, entry, model)
        for n in range(model.num_layers or 0):
            for entry in present[first:end]:
                names = tuple(name.format(n=n) for name in entry.theirs)
                yield Parameter(entry.ours.format(n=n), names, entry, model)
        for entry in present[end:]:
            yield Parameter(entry.ours, entry.theirs, entry, model)

    def to_hf(self, model: ModelConfig, source: TensorSource) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in their form, from whole parameters by canonical name."""
        for parameter in self.parameters(model):
            yield from parameter.to_hf(source(parameter.ours)).items()

    def from_hf(self, model: ModelConfig, source: TensorSource) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, whole parameter without padding), from their tensors by name."""
        for parameter in self.parameters(model):
            yield parameter.ours, parameter.from_hf([source(name) for name in parameter.theirs])
