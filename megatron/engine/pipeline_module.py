"""The layers of one process of a pipeline, as DeepSpeed's PipelineModule."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import torch
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megatron.config import ParallelConfig
from megatron.engine.deepspeed_patches import PlacedModule
from megatron.model.layer_list import LayerSpec, LayerState, layer_sequence
from megatron.parallel.mesh import Mesh
from megatron.parallel.partition import stage_bounds
from megatron.parallel.pipeline_schedules import PipelineSchedule


class StageModule(PlacedModule):
    """The stages of a layer list that one process holds.

    Args:
        layers: the whole layer list.
        parallel: how the list is cut, and what is recomputed.
        placement: a schedule that says which process holds which stages.
        mesh: the layout's process groups.

    Attributes:
        sequences: each stage as it runs, by its number.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        parallel: ParallelConfig,
        placement: PipelineSchedule,
        mesh: Mesh,
    ) -> None:
        bounds = layer_bounds(layers, parallel)
        stages = placement.stages_of(mesh.pipeline.rank)
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pipeline.size, num_mp=mesh.tensor.size, num_dp=mesh.data.size
        )
        specs = [
            _PlainSpec(layer) if layer.tied_key is None else _TiedSpec(layer) for layer in layers
        ]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints about layer seeds
            super().__init__(specs, topology, bounds, stages, placement.rank_of)
        grid = self._grid
        assert tuple(grid.pp_group) == mesh.pipeline.ranks
        assert tuple(grid.dp_group) == mesh.data.ranks
        assert tuple(grid.slice_group) == mesh.tensor.ranks
        self.sequences = {
            stage: layer_sequence(
                layers[bounds[stage] : bounds[stage + 1]],
                bounds[stage],
                self.stage_modules[bounds[stage]],
                parallel,
            )
            for stage in stages
        }

    def forward(self, stage: int, state: LayerState) -> LayerState:
        """Takes the state of a micro batch through one of this process's stages."""
        return self.sequences[stage](state)


class _PlainSpec(DeepSpeedLayerSpec):
    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(nn.Module)
        self.layer = layer

    def build(self, log: bool = False) -> nn.Module:
        return self.layer.build()


class _TiedSpec(TiedLayerSpec):
    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer.tied_key, nn.Module, tied_weight_attr="weight")
        self.layer = layer

    def build(self, log: bool = False) -> nn.Module:
        return self.layer.build()


def layer_bounds(layers: Sequence[LayerSpec], parallel: ParallelConfig) -> list[int]:
    """Where each stage starts in the layer list; see :func:`stage_bounds`."""
    weights = [0] * len(layers)
    if parallel.pipeline_partition == "parameters":
        with torch.device("meta"):
            weights = [sum(p.numel() for p in layer.build().parameters()) for layer in layers]
    blocks = [layer.block for layer in layers]
    return stage_bounds(blocks, weights, parallel.stages, parallel.pipeline_partition)
