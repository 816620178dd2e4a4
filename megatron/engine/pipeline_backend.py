"""The layer list cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.engine.json_keys import Json
from megatron.engine.pipeline_executor import PipelineExecutor
from megatron.engine.pipeline_module import StageModule
from megatron.model.layer_list import LayerSequence, initialise
from megatron.model.spec import Batch, Measure, ModelSpec
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline_schedules import Action, PipelineSchedule
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.parallel.timeline import Exchange, work_plan


class PipelineBackend:
    """A model whose layers are cut over the ranks of a pipeline, at ZeRO stage 0 or 1; see
    :class:`Backend`.

    Args:
        config: the run.
        settings: DeepSpeed's configuration.
        spec: the model.
        mesh: the layout's process groups.
        device: where the model runs.

    Attributes:
        executor: DeepSpeed's engine, once it is started.
    """

    executor: PipelineExecutor

    def __init__(
        self,
        config: RunConfig,
        settings: Json,
        spec: ModelSpec,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._parallel, self._seed = config.parallel, config.training.seed
        self._spec, self._mesh = spec, mesh
        self._tensor = TensorParallel(mesh.tensor, config.parallel.sequence_parallel)
        self.layers = spec.layers(self._tensor)
        placement = self._schedule(1, forward_only=True)
        self.model = StageModule(self.layers, config.parallel, placement, mesh)

    def _schedule(self, micro_batches: int, forward_only: bool = False) -> PipelineSchedule:
        parallel = self._parallel
        return PipelineSchedule(
            parallel.pipeline_schedule,
            ranks=self._mesh.pipeline.size,
            chunks=parallel.num_virtual_stages_per_pipeline_rank,
            micro_batches=micro_batches,
            forward_only=forward_only,
        )

    @property
    def sequences(self) -> list[LayerSequence]:
        """The layers of each of this process's stages."""
        return list(self.model.sequences.values())

    def initialise(self, name: str, param: nn.Parameter) -> None:
        """See :meth:`Backend.initialise`."""
        initialise(name, param, self._seed, self._mesh.coordinates)

    def start(self, optimizer: torch.optim.Optimizer, settings: Json) -> Any:
        """See :meth:`Backend.start`."""
        self.executor = PipelineExecutor(
            self.model, optimizer, settings, self._spec, self._tensor, self._mesh
        )
        return self.executor

    def accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        """See :meth:`Backend.accumulate`."""
        plan = _plan(self._schedule(len(seeds)), self._mesh.pipeline.rank)
        return self.executor.run(plan, batches, seeds, self._spec.loss_measure)

    def evaluate(self, batches: Iterator[Batch], count: int, measure: Measure) -> Tensor:
        """See :meth:`Backend.evaluate`."""
        plan = _plan(self._schedule(count, forward_only=True), self._mesh.pipeline.rank)
        return self.executor.run(plan, batches, [None] * count, measure)

    def apply(self) -> None:
        """See :meth:`Backend.apply`."""
        self.executor.apply()


@cache
def _plan(schedule: PipelineSchedule, rank: int) -> tuple[Action | Exchange, ...]:
    return tuple(work_plan(schedule, rank))
