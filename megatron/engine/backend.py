"""What a training engine has beneath it: layers in one of DeepSpeed's engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.engine.json_keys import Json
from megatron.model.layer_list import LayerSequence, LayerSpec
from megatron.model.spec import Batch, Measure


class Backend(Protocol):
    """The layers that a process holds, and how a step takes micro batches through them.

    Attributes:
        layers: the whole layer list.
    """

    layers: list[LayerSpec]

    @property
    def model(self) -> nn.Module:
        """This process's layers, uninitialised at first."""
        ...

    @property
    def sequences(self) -> list[LayerSequence]:
        """The same layers as they run, a sequence for each pipeline stage."""
        ...

    def initialise(self, name: str, param: nn.Parameter) -> None:
        """Fills this process's share of a parameter, whose canonical name is ``name``."""
        ...

    def start(self, optimizer: torch.optim.Optimizer, settings: Json) -> Any:
        """Builds and returns DeepSpeed's engine around model and optimizer; once, before the first
        step."""
        ...

    def accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        """Forward and backward of a step's micro batches, gradients averaged over data ranks.

        Args:
            batches: as many are taken as there are seeds.
            seeds: what the dropout masks of each micro batch derive from; None without dropout.

        Returns:
            Sums of the named losses in order, float64 [N], where they are computed; zeros on other
            pipeline stages.
        """
        ...

    def evaluate(self, batches: Iterator[Batch], count: int, measure: Measure) -> Tensor:
        """Sums of a measure's numbers over ``count`` batches, likewise; without gradients."""
        ...

    def apply(self) -> None:
        """Updates the weights."""
        ...
