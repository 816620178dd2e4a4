"""The layers of one process of a pipeline, as DeepSpeed's PipelineModule."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import torch
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron.config import ParallelConfig
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerSequence, LayerSpec, LayerState
from megatron.parallel.cross_entropy import Targets
from megatron.parallel.mesh import Mesh
from megatron.parallel.partition import stage_bounds
from megatron.parallel.pipeline_schedules import PipelineSchedule


class StageModule(PipelineModule):
    """The stages of a layer list that one process holds.

    Args:
        recipes: the whole layer list.
        parallel: how the list is cut, and what is recomputed.
        placement: a schedule that says which process holds which stages.
        mesh: the layout's process groups.
    """

    def __init__(
        self,
        recipes: Sequence[LayerSpec],
        parallel: ParallelConfig,
        placement: PipelineSchedule,
        mesh: Mesh,
    ) -> None:
        # DeepSpeed's constructor calls the methods below, which need these.
        self._recipes, self._parallel, self._placement = recipes, parallel, placement
        self._rank = mesh.pipeline.rank
        self._bounds = layer_bounds(recipes, parallel)
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pipeline.size, num_mp=mesh.tensor.size, num_dp=mesh.data.size
        )
        specs = [
            _PlainSpec(recipe) if recipe.tied_key is None else _TiedSpec(recipe)
            for recipe in recipes
        ]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints about layer seeds
            super().__init__(specs, topology=topology)
        grid = self._grid
        assert tuple(grid.pp_group) == mesh.pipeline.ranks
        assert tuple(grid.dp_group) == mesh.data.ranks
        assert tuple(grid.slice_group) == mesh.tensor.ranks

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._bounds

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that holds a layer."""
        stage = max(s for s, start in enumerate(self._bounds[:-1]) if start <= layer_idx)
        return self._placement.rank_of(stage)

    def _build(self) -> None:
        self.runs: dict[int, LayerSequence] = {}
        for stage in self._placement.stages_of(self._rank):
            begin, end = self._bounds[stage], self._bounds[stage + 1]
            self._set_bounds(begin, end)
            self.forward_funcs: list[nn.Module] = []
            super()._build()
            recipes = self._recipes[begin:end]
            self.runs[stage] = LayerSequence(recipes, begin, self.forward_funcs, self._parallel)

    def _synchronize_tied_weights(self) -> None:
        """Nothing to do: copies of a tied layer have one canonical name, which their initial values
        are drawn by."""

    def forward(
        self,
        stage: int,
        hidden: Tensor,
        position_ids_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
        dropout_seed: int | None = None,
        targets: Targets | None = None,
    ) -> Tensor:
        """Takes token ids or hidden states through one of this process's stages; with targets the
        last one gives the loss."""
        masks = AttentionMasks(document_ids_BS)
        stream = LayerState(hidden, position_ids_BS, masks, None, dropout_seed, targets)
        return self.runs[stage](stream).hidden

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks that this process holds."""
        return [block for run in self.runs.values() for block in run.blocks]


class _PlainSpec(DeepSpeedLayerSpec):
    def __init__(self, recipe: LayerSpec) -> None:
        super().__init__(nn.Module)
        self.recipe = recipe

    def build(self, log: bool = False) -> nn.Module:
        return self.recipe.build()


class _TiedSpec(TiedLayerSpec):
    def __init__(self, recipe: LayerSpec) -> None:
        super().__init__(recipe.tied_key, nn.Module, tied_weight_attr="weight")
        self.recipe = recipe

    def build(self, log: bool = False) -> nn.Module:
        return self.recipe.build()


def layer_bounds(recipes: Sequence[LayerSpec], parallel: ParallelConfig) -> list[int]:
    """Where each stage starts in the layer list; see :func:`stage_bounds`."""
    weights = [0] * len(recipes)
    if parallel.pipeline_partition == "parameters":
        with torch.device("meta"):
            weights = [sum(p.numel() for p in recipe.build().parameters()) for recipe in recipes]
    blocks = [recipe.block for recipe in recipes]
    return stage_bounds(blocks, weights, parallel.stages, parallel.pipeline_partition)
