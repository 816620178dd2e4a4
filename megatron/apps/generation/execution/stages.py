"""A model's layers over the ranks of a layout, as generation runs them: forward only, any run of
consecutive layers, one batch at a time.

Shapes: S tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.engine.pipeline_module import StageModule
from megatron.engine.train_engine import ModelEngine
from megatron.model.layer_list import LayerSequence, LayerStack, LayerState
from megatron.parallel.mesh import Group, Mesh


class EncoderOutput(NamedTuple):
    """What layers of a pass compute for layers of later stages: so many tokens, for stages that
    begin at certain layers."""

    tokens: int
    crosses: Callable[[int], bool]


@dataclass(frozen=True)
class StagedLayers:
    """The stages of a pipeline, of which this process has some.

    Attributes:
        bounds: index of the first layer of each stage, and the number of layers.
        owners: rank in the pipeline of each stage.
        own: this process's stages by number.
        weights: the matrices of their layers.
    """

    bounds: Sequence[int]
    owners: Sequence[int]
    own: Mapping[int, LayerSequence]
    weights: Sequence[Tensor]
    mesh: Mesh
    hidden: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, engine: ModelEngine) -> StagedLayers:
        model, mesh, hidden = engine.model, engine.mesh, engine.config.model.hidden_size
        if isinstance(model, LayerStack):
            return cls.alone(model, hidden, mesh)
        assert isinstance(model, StageModule)
        owners = [model.stage_owner(first) for first in model.parts[:-1]]
        weights = _matrices(model)
        dtype, device = next(model.parameters()).dtype, engine.device
        return cls(model.parts, owners, model.sequences, weights, mesh, hidden, dtype, device)

    @classmethod
    def alone(cls, model: LayerStack, hidden: int, mesh: Mesh | None = None) -> StagedLayers:
        """Those of a pipeline of one rank."""
        weights = _matrices(model)
        bounds, own = (0, len(model.layers)), {0: model.sequence}
        first = next(model.parameters())
        dtype, device = first.dtype, first.device
        return cls(bounds, (0,), own, weights, mesh or Mesh(), hidden, dtype, device)

    @property
    def layers(self) -> int:
        return self.bounds[-1]

    @property
    def last(self) -> bool:
        """Whether this process has the last layer."""
        return self.owners[-1] == self._pipeline.rank

    @property
    def last_rank(self) -> int:
        """Global rank of the last stage of this pipeline."""
        return self._pipeline.ranks[self.owners[-1]]

    @property
    def _pipeline(self) -> Group:
        return self.mesh.pipeline

    def blocks(self) -> list[nn.Module]:
        """The blocks of this process."""
        return [block for stage in sorted(self.own) for block in self.own[stage].blocks]

    def run(
        self,
        state: LayerState,
        tokens: int,
        first: int,
        end: int,
        encoded: EncoderOutput | None = None,
    ) -> LayerState | None:
        """The state after the layers ``first`` to ``end`` - 1, on the rank with the last of them;
        None on the others. Hidden states [1, ``tokens``, H] travel, and an encoder's output."""
        pipeline, found, holder = self._pipeline, state, None
        for stage, owner in enumerate(self.owners):
            begin, stop = max(first, self.bounds[stage]), min(end, self.bounds[stage + 1])
            if begin >= stop:
                continue
            if holder not in (None, owner):
                length = 0 if encoded is None or not encoded.crosses(begin) else encoded.tokens
                if holder == pipeline.rank:
                    self._send(found.hidden, owner)
                    if length:
                        assert found.encoder is not None
                        self._send(found.encoder, owner)
                elif owner == pipeline.rank:
                    found = state.changed(hidden=self._received(tokens, holder))
                    if length:
                        found = found.changed(encoder=self._received(length, holder))
            if owner == pipeline.rank:
                found = self.own[stage].part(begin, stop)(found)
            holder = owner
        return found if holder == pipeline.rank else None

    def broadcast(self, hidden: Tensor | None, tokens: int, layer: int) -> Tensor:
        """What the rank with a layer has, [1, ``tokens``, H], on all ranks of the pipeline."""
        pipeline = self._pipeline
        stage = max(s for s, start in enumerate(self.bounds[:-1]) if start <= layer)
        if hidden is None:
            hidden = self._empty(tokens)
        if pipeline.size > 1:
            hidden = hidden.contiguous()
            dist.broadcast(hidden, pipeline.ranks[self.owners[stage]], group=pipeline.handle)
        return hidden

    def _empty(self, tokens: int) -> Tensor:
        return torch.empty(1, tokens, self.hidden, dtype=self.dtype, device=self.device)

    def _send(self, hidden: Tensor, owner: int) -> None:
        pipeline = self._pipeline
        dist.send(hidden.contiguous(), pipeline.ranks[owner], group=pipeline.handle)

    def _received(self, tokens: int, holder: int | None) -> Tensor:
        assert holder is not None
        pipeline, hidden = self._pipeline, self._empty(tokens)
        dist.recv(hidden, pipeline.ranks[holder], group=pipeline.handle)
        return hidden


def _matrices(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.ndim == 2]
