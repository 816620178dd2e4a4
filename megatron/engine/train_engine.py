"""One optimizer step, and evaluation, on one of DeepSpeed's engines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.engine.compile import compile_blocks, runs_graphs
from megatron.engine.deepspeed_json import for_engine
from megatron.engine.float8 import use_float8
from megatron.engine.gradient_norm import clipping_factor, gradient_norm
from megatron.engine.json_keys import Json
from megatron.engine.lean_step import keep_gradients_in_place, take_out
from megatron.engine.loss_scale import defer_scale_growth
from megatron.engine.optimizer import build_optimizer, set_rates
from megatron.engine.program import Batch, ModelSpec, StepResult
from megatron.engine.queued_update import QueuedUpdate, can_queue, leave_norm_to_us
from megatron.model.layer_list import canonical_parameters, initialise
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import dropout_seed
from megatron.parallel.region import TensorParallel
from megatron.parallel.shard import shard_of


class TrainEngine(ABC):
    """A model in training.

    Args:
        config: the run.
        content: the completed DeepSpeed JSON.
        program: the model and its loss.
        mesh: the layout's process groups.
        device: where the model runs.

    Attributes:
        names: canonical name of each parameter that this process holds (part of).
        optimizer: torch's optimizer, inside DeepSpeed's wrapper.
        engine: DeepSpeed's engine.
    """

    engine: Any

    def __init__(
        self,
        config: RunConfig,
        content: Json,
        program: ModelSpec,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.config, self.program, self.mesh, self.device = config, program, mesh, device
        self.stage = config.engine.zero_stage
        self.recipes = program.layers(
            TensorParallel(mesh.tensor, config.parallel.sequence_parallel)
        )
        settings = for_engine(content, config, device.type == "cpu")
        self.model = self._build_model(settings)
        self.names = {param: name for name, param in canonical_parameters(self.model, self.recipes)}
        for param, name in self.names.items():
            self._initialise(name, param)
        use_float8(self.blocks(), config, device)
        if config.fast_paths.torch_compile:
            compile_blocks(self.blocks(), config.fast_paths.torch_compile_mode, device)
        self._graphs = runs_graphs(config, device)
        self.optimizer = build_optimizer(self.names, config.optimizer)
        _fit_buckets(settings, self.names, mesh)
        # It waits for the device before and after every micro batch; the trainer has a clock.
        settings.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
        queued = can_queue(config, settings)
        if queued:
            in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
            leave_norm_to_us(settings, self.stage, in_fp32)
        if mesh.data.size == 1:
            keep_gradients_in_place(settings, self.stage)
        self.engine = self._build_engine(settings)
        take_out(self.engine, mesh.data.size)
        self._grow_scale = defer_scale_growth(self.optimizer_wrapper)
        self._queued = self._queued_update() if queued else None

    @abstractmethod
    def _build_model(self, settings: Json) -> nn.Module:
        """This process's layers, uninitialised."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks that this process holds."""

    @abstractmethod
    def _build_engine(self, settings: Json) -> Any:
        """DeepSpeed's engine around model and optimizer."""

    @abstractmethod
    def _accumulate(self, batches: Iterator[Batch], seeds: Sequence[int | None]) -> Tensor:
        """Forward and backward of a step's micro batches, gradients averaged over data ranks.

        Args:
            batches: as many are taken as there are seeds.
            seeds: what the dropout masks of each micro batch derive from; None without dropout.

        Returns:
            Sum of the losses where they are computed, zero on other pipeline stages.
        """

    @abstractmethod
    def _apply(self) -> None:
        """Updates the weights."""

    @abstractmethod
    def _evaluate(self, batches: Iterator[Batch], count: int) -> Tensor:
        """Sum of the losses of ``count`` batches where they are computed, zero elsewhere."""

    def _initialise(self, name: str, param: nn.Parameter) -> None:
        initialise(name, param, self.config.training.seed, self.mesh.coordinates)

    @property
    def data_rank(self) -> int:
        """This process's data-parallel rank."""
        return self.mesh.data.rank

    def train_step(
        self,
        batches: Iterator[Batch],
        micro_batches: int,
        consumed_samples: int,
        lr: float,
        weight_decay: float,
    ) -> StepResult:
        """Takes ``micro_batches`` batches through the model and updates the weights once.

        All is queued when this returns. What was waited for nevertheless: with fp16, SGD and
        offloaded state their numbers; at stage 3, and with ``overlap_comm``, DeepSpeed's streams.

        Args:
            batches: this rank's micro batches; as many as are needed are taken.
            micro_batches: number of micro batches of this step.
            consumed_samples: samples of all steps before this one.
            lr: learning rate of this step.
            weight_decay: weight decay of this step.
        """
        if not self.model.training:  # it visits every module
            self.engine.train()
        set_rates(self.optimizer, lr, weight_decay)
        samples = self.config.training.micro_batch_size or 1
        per_round = samples * self.mesh.data.size
        self.engine.set_train_batch_size(per_round * micro_batches)
        first = consumed_samples + self.data_rank * samples
        seeds = [self._dropout_seed(first + n * per_round) for n in range(micro_batches)]
        total = self._accumulate(batches, seeds)
        scale_before = self._loss_scale()
        norm, held = self._update()
        loss = self._mean_over_ranks(total / micro_batches)
        return StepResult(loss, norm, held, scale_before)

    def _dropout_seed(self, first_sample: int) -> int | None:
        model = self.config.model
        if not model.hidden_dropout and not model.attention_dropout:
            return None
        return dropout_seed(self.config.training.seed, first_sample)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], count: int) -> float:
        """Mean loss over ``count`` micro batches of every data-parallel rank."""
        self.engine.eval()
        return float(self._mean_over_ranks(self._evaluate(batches, count) / count))

    def close(self) -> None:
        """Takes DeepSpeed's hooks off the parameters; they would keep the engine alive for ever."""
        self.engine.destroy()

    def _queued_update(self) -> QueuedUpdate:
        options = self.config
        return QueuedUpdate(
            self.optimizer_wrapper,
            self.optimizer,
            self.names,
            self.mesh,
            self.device,
            clip_grad=options.optimizer.clip_grad,
            hold=options.training.check_for_nan_in_loss_and_grad,
        )

    def _update(self) -> tuple[Tensor | float, Tensor | bool]:
        """Clips and applies the gradients; returns their norm and whether nothing was changed."""
        if self._queued is not None:
            self._queued.prepare()
            self._apply()
            assert self._queued.held is not None
            return self._queued.norm, self._queued.held
        if self.stage == 0:
            return self._update_unpartitioned()
        self._apply()
        if self.optimizer_wrapper.overflow:
            return float("inf"), True
        self._grow_scale()
        return float(self.engine.get_global_grad_norm()), False

    def _update_unpartitioned(self) -> tuple[float, bool]:
        params = list(self.names)
        norm = gradient_norm(params, self.mesh)
        finite = bool(torch.isfinite(norm))
        if not finite:
            for param in params:
                param.grad = None
        elif self.config.optimizer.clip_grad > 0:
            factor = clipping_factor(norm, self.config.optimizer.clip_grad)
            torch._foreach_mul_([p.grad for p in params if p.grad is not None], factor)
        self._apply()
        return (float(norm), False) if finite else (float("inf"), True)

    @property
    def optimizer_wrapper(self) -> Any:
        """DeepSpeed's optimizer around :attr:`optimizer` (the same object at stage 0)."""
        return self.engine.optimizer

    def _loss_scale(self) -> float:
        return float(getattr(self.optimizer_wrapper, "loss_scale", 1.0))

    def _mean_over_ranks(self, value: Tensor) -> Tensor:
        """Sum over pipeline stages, of which one computes the loss; mean over data ranks."""
        for group in (self.mesh.pipeline, self.mesh.data):
            if group.size > 1:
                dist.all_reduce(value, group=group.handle)
        return value / self.mesh.data.size


def _fit_buckets(settings: Json, params: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Makes DeepSpeed's gradient buckets no larger than this process's gradients.

    It allocates them whole in every step: 5e8 elements by default, 1 to 2 GB in 16 bits.
    """
    count = sum(math.prod(shard_of(param).local_shape(mesh.coordinates)) for param in params)
    zero = settings.setdefault("zero_optimization", {})
    zero.setdefault("reduce_bucket_size", min(count, 500_000_000))
