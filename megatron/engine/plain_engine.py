"""The whole layer list in every process: DeepSpeed's engine at any ZeRO stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from megatron.engine.json_keys import Json
from megatron.engine.mpu import Mpu
from megatron.engine.program import Batch
from megatron.engine.train_engine import TrainEngine
from megatron.engine.zero3 import partition_range, set_partition
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.shard import init_of, parameter, shard_of


class PlainEngine(TrainEngine):
    """A model without pipeline stages."""

    model: LayerStack

    def _build_model(self, settings: Json) -> LayerStack:
        with self._partitioned_construction(settings):
            return LayerStack(self.recipes, self.config.parallel)

    def _partitioned_construction(self, settings: Json) -> contextlib.AbstractContextManager:
        """At stage 3 each parameter is partitioned as soon as it exists."""
        return deepspeed.zero.Init(
            data_parallel_group=self.mesh.data.handle,
            config_dict_or_path=settings,
            enabled=self.stage == 3,
            mpu=Mpu(self.mesh),
        )

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order."""
        return self.model.blocks()

    def _build_engine(self, settings: Json) -> Any:
        engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=settings, mpu=Mpu(self.mesh)
        )
        return engine

    def _initialise(self, name: str, param: nn.Parameter) -> None:
        if self.stage < 3:
            super()._initialise(name, param)
            return
        coordinates = self.mesh.coordinates
        values = parameter(shard_of(param), init_of(param), coordinates)
        initialise(name, values, self.config.training.seed, coordinates)
        start, end = partition_range(param, self.mesh.data)
        set_partition(param, values.data.view(-1)[start:end])

    def _accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, seed in enumerate(seeds):
            last = number == len(seeds) - 1
            self.engine.set_gradient_accumulation_boundary(last)
            loss = self._loss(next(batches), seed)
            self.engine.backward(loss)
            total += loss.detach()
            if not last:
                self.engine.step()
        return total

    def _apply(self) -> None:
        self.engine.step()

    def _evaluate(self, batches: Iterator[Batch], count: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _ in range(count):
            total += self._loss(next(batches), None)
        return total

    def _loss(self, batch: Batch, seed: int | None) -> Tensor:
        batch = batch.to(self.device, non_blocking=True)
        inputs = self.program.inputs(batch)
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self.engine(
            inputs.tokens_BS,
            inputs.position_ids_BS,
            inputs.document_ids_BS,
            dropout_seed=seed,
            targets=inputs.targets,
        )
