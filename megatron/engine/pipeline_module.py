"""A process's pipeline stages, as a DeepSpeed PipelineModule, and the tensors that cross the
boundaries between stages."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron.config import ParallelConfig
from megatron.engine.deepspeed_patches import PlacedModule
from megatron.model.layer_list import LayerSpec, LayerState, layer_sequence
from megatron.parallel.mesh import Group, Mesh
from megatron.parallel.pipeline_schedules import PipelineSchedule, stage_bounds


class StageModule(PlacedModule):
    """Pipeline stages that the schedule ``placement`` assigns to this process. It can be a schedule
    for any number of micro batches. ``sequences`` has the executable layers by stage index."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        parallel: ParallelConfig,
        placement: PipelineSchedule,
        mesh: Mesh,
    ) -> None:
        bounds = layer_bounds(layers, parallel)
        self.specs = tuple(layers)
        stages = placement.stages_of(mesh.pipeline.rank)
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pipeline.size, num_mp=mesh.tensor.size, num_dp=mesh.dense.size
        )
        specs = [
            _PlainSpec(layer) if layer.tied_key is None else _TiedSpec(layer) for layer in layers
        ]
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints about layer seeds
            super().__init__(specs, topology, bounds, stages, placement.rank_of)
        grid = self._grid
        assert tuple(grid.pp_group) == mesh.pipeline.ranks
        assert tuple(grid.dp_group) == mesh.dense.ranks
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
        return self.sequences[stage](state)

    def parameters_of_stages(self) -> Iterator[tuple[int, set[nn.Parameter]]]:
        """Yield the index and the parameters of each of this process's stages."""
        for stage in self.sequences:
            layers = self.stage_modules[self.parts[stage]]
            yield stage, {param for layer in layers for param in layer.parameters()}

    def tied_parameters(self) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Yield each parameter of this process's tied layers with the group that shares it."""
        for key, tied in self.tied_comms.items():
            for param in self.tied_modules[key].parameters():
                yield param, tied["group"]


class _PlainSpec(DeepSpeedLayerSpec):
    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(nn.Module)
        self.layer = layer

    def build(self, log: bool = False) -> nn.Module:
        return self.layer.build()


class _TiedSpec(TiedLayerSpec):
    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer.tied_key, nn.Module)
        self.layer = layer

    def build(self, log: bool = False) -> nn.Module:
        return self.layer.build()


def layer_bounds(layers: Sequence[LayerSpec], parallel: ParallelConfig) -> list[int]:
    """Return the index of the first layer of each stage, followed by the number of layers."""
    weights = [0] * len(layers)
    if parallel.pipeline_partition == "parameters":
        with torch.device("meta"):
            weights = [sum(p.numel() for p in layer.build().parameters()) for layer in layers]
    return stage_bounds(
        [layer.block for layer in layers],
        weights,
        parallel.stages,
        parallel.pipeline_partition,
        [layer.cost for layer in layers],
        [layer.with_next_block for layer in layers],
    )


_COMPUTED = ("hidden", "encoder")


class Boundary(NamedTuple):
    """Tensors that cross one stage boundary, in the order in which they are sent, with their shapes
    and dtypes. A name is a field of :class:`LayerState` or the name of a loss."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(
        cls, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, widened: bool = False
    ) -> Boundary:
        """Return a boundary for tensors of these shapes, by name. ``dtype`` is the weights' dtype.
        Losses have at least 32 bits. With ``widened``, so do hidden states."""
        wide = torch.promote_types(dtype, torch.float32)
        computed = {"hidden": wide if widened else dtype, "encoder": dtype}
        return cls(
            tuple(shapes),
            tuple(tuple(shape) for shape in shapes.values()),
            tuple(computed.get(name, wide) for name in shapes),
        )

    def taken_from(self, state: LayerState) -> tuple[Tensor, ...]:
        tensors = tuple(
            getattr(state, name) if name in _COMPUTED else state.losses[name].to(dtype)
            for name, dtype in zip(self.names, self.dtypes, strict=True)
        )
        for name, tensor, shape, dtype in zip(*self[:1], tensors, *self[1:], strict=True):
            has = tuple(tensor.shape), tensor.dtype
            assert has == (shape, dtype), f"{name} is {has} between stages, not {shape, dtype}"
        return tensors

    def put_into(self, state: LayerState, tensors: Sequence[Tensor]) -> LayerState:
        values = dict(zip(self.names, tensors, strict=True))
        hidden, encoder = (values.pop(name, getattr(state, name)) for name in _COMPUTED)
        return state.changed(hidden=hidden, encoder=encoder, losses={**state.losses, **values})

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def check_agreement(boundaries: Sequence[Boundary], pipeline: Group) -> None:
    """Check that all ranks of a pipeline have derived the same boundaries. Collective. Raises
    AssertionError if two ranks differ; the message has the boundary and what each rank expects."""
    of_stages = pipeline.gathered(tuple(boundaries))
    for stage, ours in enumerate(zip(*of_stages, strict=True)):
        for rank, theirs in enumerate(ours):
            assert theirs == ours[0], (
                f"between pipeline stages {stage} and {stage + 1} rank 0 of the pipeline expects "
                f"{ours[0]}, rank {rank} {theirs}"
            )
