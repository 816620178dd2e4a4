"""The layer list cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

from torch import Tensor, nn

from megatron.engine.json_keys import Json
from megatron.engine.pipeline_executor import PipelineExecutor
from megatron.engine.pipeline_module import StageModule
from megatron.engine.program import Batch
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.pipeline_messages import Exchange, work_plan
from megatron.parallel.pipeline_schedules import Action, PipelineSchedule


class PipelinedEngine(TrainEngine):
    """A model whose layers are cut over the ranks of a pipeline, at ZeRO stage 0 or 1."""

    model: StageModule
    engine: PipelineExecutor

    def _schedule(self, micro_batches: int, forward_only: bool = False) -> PipelineSchedule:
        parallel = self.config.parallel
        return PipelineSchedule(
            parallel.pipeline_schedule or "1f1b",
            ranks=self.mesh.pipeline.size,
            chunks=parallel.num_virtual_stages_per_pipeline_rank or 1,
            micro_batches=micro_batches,
            forward_only=forward_only,
        )

    def _build_model(self, settings: Json) -> StageModule:
        placement = self._schedule(1, forward_only=True)
        return StageModule(self.recipes, self.config.parallel, placement, self.mesh)

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of this process's stages."""
        return self.model.blocks()

    def _build_engine(self, settings: Json) -> Any:
        return PipelineExecutor(
            self.model,
            self.optimizer,
            settings,
            self.program,
            self.mesh,
        )

    def _hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        samples, length = self.program.inputs(batch).tokens_BS.shape
        split = self.mesh.tensor.size if self.config.parallel.sequence_parallel else 1
        assert self.config.model.hidden_size and length % split == 0
        return samples, length // split, self.config.model.hidden_size

    def _accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        return self._run(self._schedule(len(seeds)), batches, seeds)

    def _apply(self) -> None:
        self.engine.apply()

    def _evaluate(self, batches: Iterator[Batch], count: int) -> Tensor:
        return self._run(self._schedule(count, forward_only=True), batches, [None] * count)

    def _run(
        self, schedule: PipelineSchedule, batches: Iterator[Batch], seeds: Sequence[int | None]
    ) -> Tensor:
        # Every process reads every micro batch, and those of one step have one shape: so it knows
        # what it will receive, whatever the step before had.
        first = next(batches)
        plan = _plan(schedule, self.mesh.pipeline.rank)
        return self.engine.run(plan, chain([first], batches), seeds, self._hidden_shape(first))


@cache
def _plan(schedule: PipelineSchedule, rank: int) -> tuple[Action | Exchange, ...]:
    return tuple(work_plan(schedule, rank))
