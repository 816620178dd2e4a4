"""The whole layer list in every process: DeepSpeed's engine at any ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron.config import RunConfig
from megatron.engine.compile import runs_graphs
from megatron.engine.deepspeed_patches import partition_range, set_partition
from megatron.engine.json_keys import Json
from megatron.engine.mpu import Mpu
from megatron.model.layer_list import LayerSequence, LayerStack, initialise
from megatron.model.spec import Batch, Measure, ModelSpec
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import init_of, parameter, shard_of
from megatron.parallel.tensor_parallel import TensorParallel


class PlainBackend:
    """A model without pipeline stages; see :class:`Backend`.

    Args:
        config: the run.
        settings: DeepSpeed's configuration.
        spec: the model.
        mesh: the layout's process groups.
        device: where the model runs.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: Json,
        spec: ModelSpec,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._spec, self._mesh, self._device = spec, mesh, device
        self._seed, self._stage = config.training.seed, config.engine.zero_stage
        self._graphs = runs_graphs(config, device)
        self._engine: Any = None
        self.layers = spec.layers(TensorParallel(mesh.tensor, config.parallel.sequence_parallel))
        # At stage 3 each parameter is partitioned as soon as it exists.
        with deepspeed.zero.Init(
            data_parallel_group=mesh.data.handle,
            config_dict_or_path=settings,
            enabled=self._stage == 3,
            mpu=Mpu(mesh),
        ):
            self.model = LayerStack(self.layers, config.parallel)

    @property
    def sequences(self) -> list[LayerSequence]:
        """The layers, as they run."""
        return [self.model.sequence]

    def initialise(self, name: str, param: nn.Parameter) -> None:
        """See :meth:`Backend.initialise`."""
        coordinates = self._mesh.coordinates
        if self._stage < 3:
            initialise(name, param, self._seed, coordinates)
            return
        values = parameter(shard_of(param), init_of(param), coordinates)
        initialise(name, values, self._seed, coordinates)
        start, end = partition_range(param, self._mesh.data)
        set_partition(param, values.data.view(-1)[start:end])

    def start(self, optimizer: torch.optim.Optimizer, settings: Json) -> Any:
        """See :meth:`Backend.start`."""
        self._engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=settings, mpu=Mpu(self._mesh)
        )
        return self._engine

    def accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        """See :meth:`Backend.accumulate`."""
        engine, measure = self._engine, self._spec.loss_measure
        sums = torch.zeros(len(measure.names), dtype=torch.float64, device=self._device)
        for number, seed in enumerate(seeds):
            last = number == len(seeds) - 1
            engine.set_gradient_accumulation_boundary(last)
            with record_function("megatron::data"):
                batch = next(batches)
            batch = batch.to(self._device, non_blocking=True)
            begin = self._spec.begin(batch)._replace(dropout_seed=seed)
            if self._graphs:
                torch.compiler.cudagraph_mark_step_begin()
            # Of the state only the losses are kept: the backward pass needs the memory.
            with record_function("megatron::forward"):
                losses = engine(begin).losses
            with record_function("megatron::backward"):
                engine.backward(self._spec.total(losses))
            sums += measure.of(begin._replace(losses=losses), batch)
            if not last:
                engine.step()
        return sums

    def evaluate(self, batches: Iterator[Batch], count: int, measure: Measure) -> Tensor:
        """See :meth:`Backend.evaluate`."""
        sums = torch.zeros(len(measure.names), dtype=torch.float64, device=self._device)
        for _ in range(count):
            batch = next(batches).to(self._device, non_blocking=True)
            if self._graphs:
                torch.compiler.cudagraph_mark_step_begin()
            sums += measure.of(self._engine(measure.start(self._spec.begin(batch))), batch)
        return sums

    def apply(self) -> None:
        """See :meth:`Backend.apply`."""
        self._engine.step()
