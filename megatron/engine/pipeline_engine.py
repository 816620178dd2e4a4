"""The layer list cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from megatron.engine.deepspeed_json import Json
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
            ranks=self.groups.pipeline.size,
            chunks=parallel.num_virtual_stages_per_pipeline_rank or 1,
            micro_batches=micro_batches,
            forward_only=forward_only,
        )

    def _build_model(self, settings: Json) -> StageModule:
        placement = self._schedule(1, forward_only=True)
        return StageModule(self.recipes, self.config.parallel, placement, self.groups)

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of this process's stages."""
        return self.model.blocks()

    def _build_engine(self, settings: Json) -> Any:
        return PipelineExecutor(
            self.model,
            self.optimizer,
            settings,
            self.program,
            self.groups,
            self._hidden_shape(),
        )

    def _hidden_shape(self) -> tuple[int, ...]:
        model, training, parallel = self.config.model, self.config.training, self.config.parallel
        assert model.seq_length and model.hidden_size and training.micro_batch_size
        split = self.groups.tensor.size if parallel.sequence_parallel else 1
        return training.micro_batch_size, model.seq_length // split, model.hidden_size

    def _accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        schedule = self._schedule(len(seeds))
        return self.engine.run(_plan(schedule, self.groups.pipeline.rank), batches, seeds)

    def _apply(self) -> None:
        self.engine.apply()

    def _evaluate(self, batches: Iterator[Batch], count: int) -> Tensor:
        schedule = self._schedule(count, forward_only=True)
        seeds = [None] * count
        return self.engine.run(_plan(schedule, self.groups.pipeline.rank), batches, seeds)


@cache
def _plan(schedule: PipelineSchedule, rank: int) -> tuple[Action | Exchange, ...]:
    return tuple(work_plan(schedule, rank))
