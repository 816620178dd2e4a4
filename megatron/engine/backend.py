"""Backends, which run a process's layers: the whole layer list at any ZeRO stage, or the stages of
a pipeline. They train in one of DeepSpeed's engines, or evaluate without one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from operator import add
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron.config import RunConfig
from megatron.config.engine import GRAPH_MODES
from megatron.engine.compilation import why_eager
from megatron.engine.deepspeed_json import Json, stage_of
from megatron.engine.deepspeed_patches import (
    fetching_whole,
    partition_among_replicas,
    partition_late,
    partition_range,
    set_partition,
)
from megatron.engine.environment import Mpu
from megatron.engine.pipeline_executor import PipelineExecutor, PipelinePasses
from megatron.engine.pipeline_module import StageModule
from megatron.engine.update.shared_gradients import SharedGradients
from megatron.engine.update.zero_optimizer import ParameterUse
from megatron.model.layer_list import LayerSequence, LayerStack, canonical_parameters, initialise
from megatron.model.spec import Batch, Measure, ModelSpec
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline_schedules import Action, PipelineSchedule
from megatron.parallel.shard import init_of, parameter, shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.parallel.timeline import Exchange, work_plan
from megatron.util.phases import moved


class Backend(ABC):
    """Layers of a process, and how micro batches pass through them. ``model`` has these layers, at
    first uninitialised, out of the whole layer list ``layers``. ``stage`` is the ZeRO stage that
    runs, and ``tensor_parallel`` has the groups over which all layers are sharded."""

    model: nn.Module
    losses: Sequence[Tensor] = ()
    """Losses of each micro batch of the last step, in order, float64 [N] for N named losses. Empty
    on pipeline stages that do not compute losses."""
    shared: SharedGradients | None = None
    """Sums gradients over tensor-parallel ranks once per step; None if backward passes do."""

    def __init__(
        self,
        config: RunConfig,
        settings: Json,
        spec: ModelSpec,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._config, self._mesh, self._device = config, mesh, device
        self.tensor_parallel = TensorParallel.of(mesh, config.parallel)
        self._spec = spec.divided(self.tensor_parallel.context)
        self.layers, self.stage = spec.layers(self.tensor_parallel), stage_of(settings)
        self.model = self._build(settings)
        self.await_weights: Callable[[], None] = lambda: None

    @abstractmethod
    def _build(self, settings: Json) -> nn.Module:
        """Return the layers of this process, not yet initialised."""

    def uses(self) -> dict[nn.Parameter, ParameterUse]:
        """Return how each parameter of this process is used in the forward and backward passes."""
        params = (param for _, param in canonical_parameters(self.model, self.layers))
        return {param: ParameterUse(number) for number, param in enumerate(params)}

    @property
    @abstractmethod
    def sequences(self) -> list[LayerSequence]:
        """Layers of this process in execution order, one sequence per pipeline stage."""

    def initialise(self, name: str, param: nn.Parameter) -> None:
        """Initialise this process's shard of a parameter. ``name`` is its canonical name."""
        initialise(name, param, self._config.training.seed, self._mesh.coordinates)

    @abstractmethod
    def start(self, optimizer: torch.optim.Optimizer, settings: Json) -> Any:
        """Return DeepSpeed's engine for the model and ``optimizer``. Called before any step."""

    @abstractmethod
    def start_without_training(self) -> None:
        """Prepare for evaluation only. Called instead of :meth:`start`."""

    @abstractmethod
    def accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        """Run the forward and backward passes of a step, and average the gradients over
        data-parallel ranks. ``seeds`` are the micro batches' dropout seeds. Return the sum of each
        named loss, float64 [N]; zeros on pipeline stages that do not compute losses."""

    def _sum_shared(self) -> None:
        """Sum the gradients of :attr:`shared`. Called at the end of :meth:`accumulate`."""
        if self.shared is not None:
            self.shared.sum()

    @abstractmethod
    def evaluate(self, batches: Iterator[Batch], count: int, measure: Measure) -> list[Tensor]:
        """Return a measure's values (see :meth:`Measure.of`) for each of ``count`` micro batches,
        without gradients. The list is empty on pipeline stages that do not compute them."""

    @abstractmethod
    def apply(self) -> None:
        """Update the weights."""


class PlainBackend(Backend):
    """Backend that runs the whole layer list in every process, at any ZeRO stage."""

    model: LayerStack

    def _build(self, settings: Json) -> LayerStack:
        self._graphs = runs_graphs(self._config, self._device)
        if self.stage < 3:
            return LayerStack(self.layers, self._config.parallel)
        # This context partitions each parameter as soon as it is created.
        init = deepspeed.zero.Init(
            data_parallel_group=self._mesh.dense.handle,
            config_dict_or_path=settings,
            mpu=Mpu(self._mesh),
        )
        partition_among_replicas(init, self._mesh)
        with init:
            model = LayerStack(self.layers, self._config.parallel)
            partition_late(model)
            return model

    @property
    def sequences(self) -> list[LayerSequence]:
        return [self.model.sequence]

    def initialise(self, name: str, param: nn.Parameter) -> None:
        if self.stage < 3:
            return super().initialise(name, param)
        values = parameter(shard_of(param), init_of(param), self._mesh.coordinates)
        super().initialise(name, values)
        start, end = partition_range(param, self._mesh.replicas(shard_of(param)))
        set_partition(param, values.data.view(-1)[start:end])

    def start(self, optimizer: torch.optim.Optimizer, settings: Json) -> Any:
        with fetching_whole(self.model.blocks() if self.stage == 3 else ()):
            self._engine, *_ = deepspeed.initialize(
                model=self.model, optimizer=optimizer, config=settings, mpu=Mpu(self._mesh)
            )
        return self._engine

    def start_without_training(self) -> None:
        self._engine = self.model

    def accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        engine, measure = self._engine, self._spec.loss_measure
        reduction = getattr(engine.optimizer, "reduction", None)
        sums = torch.zeros(len(measure.names), dtype=torch.float64, device=self._device)
        self.losses = losses_of_batches = list[Tensor]()
        for number, seed in enumerate(seeds):
            last = number == len(seeds) - 1
            engine.set_gradient_accumulation_boundary(last)
            moved()
            with record_function("megatron::data"):
                batch = next(batches)
            batch = batch.to(self._device, non_blocking=True)
            begin = self._spec.begin(batch).changed(dropout_seed=seed)
            if self._graphs:
                torch.compiler.cudagraph_mark_step_begin()
            # Keep only the losses of the final state: the backward pass needs the memory.
            with record_function("megatron::forward"):
                losses = engine(begin).losses
            with record_function("megatron::backward"):
                if reduction is not None:
                    reduction.begin_pass(last)
                engine.backward(self._spec.total(losses))
                if reduction is not None:
                    reduction.end_pass()
            losses_of_batches.append(measure.of(begin.changed(losses=losses), batch))
            sums += losses_of_batches[-1]
            if not last:
                engine.step()
        self._sum_shared()
        return sums

    def evaluate(self, batches: Iterator[Batch], count: int, measure: Measure) -> list[Tensor]:
        results = []
        for _ in range(count):
            moved()
            batch = next(batches).to(self._device, non_blocking=True)
            if self._graphs:
                torch.compiler.cudagraph_mark_step_begin()
            state = self._engine(measure.start(self._spec.begin(batch)))
            results.append(measure.of(state, batch))
        return results

    def apply(self) -> None:
        self._engine.step()


def runs_graphs(config: RunConfig, device: torch.device) -> bool:
    """Return whether blocks run as CUDA graphs. If so, ``torch.compiler.cudagraph_mark_step_begin``
    must be called before each pass. Otherwise a block could overwrite its own input, since a graph
    writes its outputs to the same memory every time (pytorch issue 160281)."""
    graphs = config.fast_paths.torch_compile_mode in GRAPH_MODES
    return graphs and device.type == "cuda" and why_eager(config, device) is None


class PipelineBackend(Backend):
    """Backend that runs a process's pipeline stages, at ZeRO stage 0, 1 or 2. In training,
    :meth:`start` sets ``executor``, which is DeepSpeed's engine."""

    model: StageModule
    executor: PipelineExecutor
    _passes: PipelinePasses

    def _build(self, settings: Json) -> StageModule:
        placement = self._schedule(1, forward_only=True)
        return StageModule(self.layers, self._config.parallel, placement, self._mesh)

    def _schedule(self, micro_batches: int, forward_only: bool = False) -> PipelineSchedule:
        parallel = self._config.parallel
        return PipelineSchedule(
            parallel.pipeline_schedule,
            ranks=self._mesh.pipeline.size,
            chunks=parallel.num_virtual_stages_per_pipeline_rank,
            micro_batches=micro_batches,
            forward_only=forward_only,
        )

    @property
    def sequences(self) -> list[LayerSequence]:
        return list(self.model.sequences.values())

    def uses(self) -> dict[nn.Parameter, ParameterUse]:
        uses, tied = super().uses(), dict(self.model.tied_parameters())
        stages = dict(self.model.parameters_of_stages())
        for param, use in uses.items():
            passes = tuple(stage for stage, params in stages.items() if param in params)
            uses[param] = use._replace(passes=passes, tied=tied.get(param))
        # Copies of a tied parameter get the same position on all stages, before other parameters.
        return uses | {p: uses[p]._replace(position=n - len(tied)) for n, p in enumerate(tied)}

    def start(self, optimizer: torch.optim.Optimizer, settings: Json) -> Any:
        if self.stage == 2:  # reduced by us; DeepSpeed's pipeline engine refuses stage 2
            zero = {**settings["zero_optimization"], "stage": 1}
            settings = {**settings, "zero_optimization": zero}
        self.executor = PipelineExecutor(
            self.model, optimizer, settings, self._spec, self.tensor_parallel, self._mesh
        )
        self._passes = self.executor
        return self.executor

    def start_without_training(self) -> None:
        self._passes = PipelinePasses(self.model, self._device)
        self._passes.connect(self._spec, self.tensor_parallel, self._mesh)

    def accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        plan = _plan(self._schedule(len(seeds)), self._mesh.pipeline.rank)
        measure = self._spec.loss_measure
        results = self.executor.run(plan, batches, seeds, measure)
        self._sum_shared()
        sums = torch.zeros(len(measure.names), dtype=torch.float64, device=self._device)
        self.losses = [results[number] for number in sorted(results)]
        return reduce(add, results.values(), sums)

    def evaluate(self, batches: Iterator[Batch], count: int, measure: Measure) -> list[Tensor]:
        plan = _plan(self._schedule(count, forward_only=True), self._mesh.pipeline.rank)
        results = self._passes.run(plan, batches, [None] * count, measure)
        return [results[number] for number in sorted(results)]

    def apply(self) -> None:
        self.executor.apply()


@cache
def _plan(schedule: PipelineSchedule, rank: int) -> tuple[Action | Exchange, ...]:
    return tuple(work_plan(schedule, rank))
