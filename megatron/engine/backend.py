"""The layers that a process trains, in one of DeepSpeed's engines, or evaluates without one: the
whole layer list at any ZeRO stage, or the stages of a pipeline."""

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
    """The layers of a process (``model``, uninitialised at first, of the whole layer list
    ``layers``), and how a step takes micro batches through them; ``stage`` is the ZeRO stage that
    runs."""

    model: nn.Module
    losses: Sequence[Tensor] = ()
    """Losses of each micro batch of the last step, in order, float64 [N]; empty on pipeline stages
    that do not compute them."""
    shared: SharedGradients | None = None
    """Gradients that are summed over tensor-parallel ranks once a step."""

    def __init__(
        self,
        config: RunConfig,
        settings: Json,
        spec: ModelSpec,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._config, self._mesh, self._device = config, mesh, device
        self._tp = TensorParallel.of(mesh, config.parallel)
        self._spec = spec.divided(self._tp.context)
        self.layers, self.stage = spec.layers(self._tp), stage_of(settings)
        self.model = self._build(settings)
        self.await_weights: Callable[[], None] = lambda: None

    @abstractmethod
    def _build(self, settings: Json) -> nn.Module:
        """The layers of this process."""

    @property
    def tensor_parallel(self) -> TensorParallel:
        """Groups of ranks that all layers are cut over."""
        return self._tp

    def uses(self) -> dict[nn.Parameter, ParameterUse]:
        """The use of each parameter of this process."""
        params = (param for _, param in canonical_parameters(self.model, self.layers))
        return {param: ParameterUse(number) for number, param in enumerate(params)}

    @property
    @abstractmethod
    def sequences(self) -> list[LayerSequence]:
        """The layers of this process as they run, a sequence for each pipeline stage."""

    def initialise(self, name: str, param: nn.Parameter) -> None:
        """Fills this process's share of a parameter, whose canonical name is ``name``."""
        initialise(name, param, self._config.training.seed, self._mesh.coordinates)

    @abstractmethod
    def start(self, optimizer: torch.optim.Optimizer, settings: Json) -> Any:
        """DeepSpeed's engine around model and optimizer; called once, before the first step."""

    @abstractmethod
    def start_without_training(self) -> None:
        """Instead of :meth:`start`, for evaluations only."""

    @abstractmethod
    def accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        """Forward and backward of a step's micro batches, gradients averaged over data ranks;
        ``seeds`` are those of the dropout masks. Returns sums of the named losses in order, float64
        [N]; zeros on pipeline stages that do not compute them."""

    def _sum_shared(self) -> None:
        """The end of :meth:`accumulate`."""
        if self.shared is not None:
            self.shared.sum()

    @abstractmethod
    def evaluate(self, batches: Iterator[Batch], count: int, measure: Measure) -> list[Tensor]:
        """A measure's numbers for each of ``count`` batches, see :meth:`Measure.of`, without
        gradients; nothing on pipeline stages that do not compute them."""

    @abstractmethod
    def apply(self) -> None:
        """Updates the weights."""


class PlainBackend(Backend):
    """The whole layer list in every process, at any ZeRO stage."""

    model: LayerStack

    def _build(self, settings: Json) -> LayerStack:
        self._graphs = runs_graphs(self._config, self._device)
        if self.stage < 3:
            return LayerStack(self.layers, self._config.parallel)
        # Each parameter is partitioned as soon as it exists.
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
            # Only the losses of the state are kept: the backward pass needs the memory.
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
    """True if blocks run as CUDA graphs, so that ``torch.compiler.cudagraph_mark_step_begin`` must
    be called before each pass: without it a block could overwrite its own input, as a graph writes
    its outputs to the same memory every time (pytorch issue 160281)."""
    graphs = config.fast_paths.torch_compile_mode in GRAPH_MODES
    return graphs and device.type == "cuda" and why_eager(config, device) is None


class PipelineBackend(Backend):
    """Layers cut over the ranks of a pipeline, at ZeRO stage 0, 1 or 2; ``executor``, once it is
    started, is DeepSpeed's engine where they are trained."""

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
        # Copies of a parameter have one place on all stages, before all others.
        return uses | {p: uses[p]._replace(position=n - len(tied)) for n, p in enumerate(tied)}

    def start(self, optimizer: torch.optim.Optimizer, settings: Json) -> Any:
        if self.stage == 2:  # only this trainer's reduction knows it, not DeepSpeed's engine
            zero = {**settings["zero_optimization"], "stage": 1}
            settings = {**settings, "zero_optimization": zero}
        self.executor = PipelineExecutor(
            self.model, optimizer, settings, self._spec, self._tp, self._mesh
        )
        self._passes = self.executor
        return self.executor

    def start_without_training(self) -> None:
        self._passes = PipelinePasses(self.model, self._device)
        self._passes.connect(self._spec, self._tp, self._mesh)

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
