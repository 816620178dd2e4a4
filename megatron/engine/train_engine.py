"""Training steps (:meth:`TrainEngine.train_step`) and evaluation of a model in DeepSpeed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from megatron.config import RunConfig
from megatron.engine.backend import Backend
from megatron.engine.deepspeed_patches import (
    defer_scale_growth,
    drop_gradients,
    keep_smallest_scale,
)
from megatron.engine.update.adam import KeptState, Partition, StateStore
from megatron.engine.update.async_step import AsyncOptimizerStep
from megatron.engine.update.optimizer import clipping_factor, gradient_norm, set_rates
from megatron.model.layer_list import LayerSequence, canonical_buffers
from megatron.model.spec import Batch, Measure, ModelSpec
from megatron.parallel.linear import KernelStates
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import dropout_seed


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step. Its tensors may still be computed; reading one waits.

    Attributes:
        loss: minimised loss, the weighted sum of ``losses``; a scalar on the device.
        losses: means over micro batches and data-parallel ranks, by name; scalars on the device.
        grad_norm: global 2-norm of the gradients before clipping, a scalar on the device or a
            float. Infinite if the gradients are not finite.
        skipped: 1 if no weight changed because gradients were not finite, else 0; on the device, or
            a bool.
        loss_scale: loss scale of the step; 1 without fp16.
        scale_exhausted: whether the step was skipped at the minimum loss scale, so that the
            following steps will be skipped too.
        own_loss: sum of the losses of this rank's micro batches, a scalar on the device; 0 on
            pipeline stages that do not compute losses.
        zeros: number of gradient elements that are zero, a scalar on the device; None if
            :attr:`TrainEngine.count_zeros` is not set.
    """

    loss: Tensor
    losses: Mapping[str, Tensor]
    grad_norm: Tensor | float
    skipped: Tensor | bool
    loss_scale: float
    scale_exhausted: bool = False
    own_loss: Tensor | float = 0.0
    zeros: Tensor | None = None


class ModelEngine:
    """Model that is distributed over the ranks of a mesh and can be evaluated.

    Args:
        names: canonical name of each parameter that this process has, whole or sharded.
        kernels: state that the kernels of linear layers keep between steps.

    Attributes:
        stage: the ZeRO stage that runs, which can differ from the requested one.
        buffers: buffers of this process, by canonical name.
        stored_states: storage format of main weights and moments; None for float32.
        base: record of the model that adapters belong to, which checkpoints store as JSON (its
            ``to_json``); None without adapters.
        teach: adds the outputs of another model, such as a teacher, to the given number of micro
            batches, as inputs of the losses; None if the losses need no other model.
    """

    stored_states: StateStore | None = None
    base: Any = None
    teach: Callable[[Iterator[Batch], int], Iterator[Batch]] | None = None

    def __init__(
        self,
        config: RunConfig,
        spec: ModelSpec,
        mesh: Mesh,
        device: torch.device,
        backend: Backend,
        names: Mapping[nn.Parameter, str],
        kernels: KernelStates,
    ) -> None:
        self.config, self.spec, self.mesh, self.device = config, spec, mesh, device
        self.backend, self._names, self.kernels = backend, names, kernels
        self._trained = {param: name for param, name in names.items() if param.requires_grad}
        self.layers, self.stage = backend.layers, backend.stage
        self.buffers = dict(canonical_buffers(backend.model, self.layers))
        for buffer in self.buffers.values():
            buffer.start(device)
        self.quantised: list[tuple[str, Any]] = []
        """Canonical name and weight of each quantised weight of this process. Quantised weights are
        not parameters; their ``fill`` method quantises a loaded tensor."""

    @property
    def model(self) -> nn.Module:
        """Layers of this process. This property, :attr:`names` and :attr:`trained` wait for the
        last update. Read weights only through them, except in forward passes."""
        self.backend.await_weights()
        return self.backend.model

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """Canonical name of each parameter that this process has, whole or sharded."""
        self.backend.await_weights()
        return self._names

    @property
    def trained(self) -> Mapping[nn.Parameter, str]:
        """Canonical name of each trained parameter. All other parameters are frozen: they have no
        gradients or optimizer state, and checkpoints omit them."""
        self.backend.await_weights()
        return self._trained

    @property
    def sequences(self) -> list[LayerSequence]:
        """Layers of this process in execution order, one sequence per pipeline stage."""
        return self.backend.sequences

    def evaluate(
        self, batches: Iterator[Batch], count: int, measure: Measure | None = None
    ) -> dict[str, float]:
        """Evaluate ``count`` micro batches per data-parallel rank, and return the report of
        ``measure``, by default of ``spec.evaluated`` or else of the losses. Collective."""
        measure = measure or self.spec.evaluated
        if measure is None:
            batches, measure = self.taught(batches, count), self.spec.loss_measure
        assert not measure.per_sample
        sums = torch.zeros(len(measure.names), dtype=torch.float64, device=self.device)
        means = self._mean_over_ranks(
            reduce(add, self.measured(batches, count, measure), sums) / count
        )
        return measure.report(dict(zip(measure.names, means.tolist(), strict=True)))

    def taught(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the next ``count`` micro batches, with what :attr:`teach` adds, if set."""
        return batches if self.teach is None else self.teach(batches, count)

    @record_function("megatron::evaluate")
    @torch.no_grad()
    def measured(self, batches: Iterator[Batch], count: int, measure: Measure) -> list[Tensor]:
        """Return the values of ``measure`` (see :meth:`Measure.of`) for each of ``count`` micro
        batches of this rank. The list is empty on pipeline stages that do not compute them."""
        self.prepare_evaluation()
        self.kernels.refresh()
        return self.backend.evaluate(batches, count, measure)

    def prepare_evaluation(self) -> None:
        """Switch the model to evaluation mode."""
        if self.model.training:
            self.model.eval()

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        """Sum over pipeline stages (zero on all but one) and average over data-parallel ranks."""
        for group in (self.mesh.pipeline, self.mesh.samples):
            if group.size > 1:
                dist.all_reduce(values, group=group.handle)
        return values / self.mesh.samples.size


class TrainEngine(ModelEngine):
    """Model in training, built by :func:`build_engine`. For further arguments see the base class.

    Args:
        asynchronous: whether steps do not wait for the device (:class:`AsyncOptimizerStep`).

    Attributes:
        look_ahead: called with a step's micro batches and their number before the first pass;
            returns the micro batches to train on. None leaves them unchanged.
        judge: called instead of :meth:`Backend.accumulate`, which it calls once or several times.
            It gets a step's micro batches, their dropout seeds and the number of samples before the
            step, and returns the sums of the losses.
        count_zeros: counts zeros in the next step's gradients, on every rank; None counts nothing.
        timed: whether steps record ``marks``: the times before their passes, after them and after
            the update, in seconds; on a CUDA device, events that it may not have reached yet.
        view: returns a float32 :class:`Partition` for an updated tensor and its states, if
            checkpoints store other weights than the trained ones; None otherwise.
        kept: states that features keep besides the optimizer's, by name; see :class:`KeptState`.
        switch: called with True before training passes and with False before evaluations, to set
            the weights that the model computes with; None if they are the same.
        content: the completed DeepSpeed JSON.
    """

    content: Mapping[str, Any] = MappingProxyType({})
    look_ahead: Callable[[Iterator[Any], int], Iterator[Any]] | None = None
    judge: Callable[[list[Any], list[int | None], int], Tensor] | None = None
    count_zeros: Callable[[TrainEngine], Tensor] | None = None
    timed = False
    view: Callable[[Tensor, Mapping[str, Tensor]], Partition] | None = None
    switch: Callable[[bool], None] | None = None

    def __init__(
        self,
        config: RunConfig,
        spec: ModelSpec,
        mesh: Mesh,
        device: torch.device,
        backend: Backend,
        names: Mapping[nn.Parameter, str],
        optimizer: torch.optim.Optimizer,
        engine: Any,
        asynchronous: bool,
        kernels: KernelStates,
        stored_states: StateStore | None = None,
    ) -> None:
        super().__init__(config, spec, mesh, device, backend, names, kernels)
        self.marks: list[Any] = []
        self.kept: dict[str, KeptState] = {}
        self.optimizer, self.engine, self.stored_states = optimizer, engine, stored_states
        self._samples_per_round = config.training.micro_batch_size * mesh.samples.size
        self._grow_scale = defer_scale_growth(self.optimizer_wrapper)
        self._scale_is_smallest = keep_smallest_scale(self.optimizer_wrapper)
        self._async_step = None
        if asynchronous:
            self._async_step = AsyncOptimizerStep(
                self.optimizer_wrapper,
                optimizer,
                self.trained,
                mesh,
                device,
                clip_grad=config.optimizer.clip_grad,
                hold=config.training.check_for_nan_in_loss_and_grad,
                form=stored_states,
            )

    def train_step(
        self,
        batches: Iterator[Batch],
        micro_batches: int,
        consumed_samples: int,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
    ) -> StepResult:
        """Run ``micro_batches`` forward and backward passes, then update the weights once.

        The CPU waits for the device only for numbers that fp16, SGD and offloaded optimizer state
        need, at stage 3, and with ``overlap_comm``. ``consumed_samples`` is the number of samples
        of all earlier steps; dropout seeds depend on it.
        """
        set_rates(self.optimizer, lr, weight_decay, decoupled_lr)
        if self.look_ahead is not None:
            batches = self.look_ahead(batches, micro_batches)
        self.prepare(micro_batches)
        seeds = self._dropout_seeds(consumed_samples, micro_batches)
        taught = self.taught(batches, micro_batches)
        self.marks = []
        self._mark()
        if self.judge is None:
            sums = self.backend.accumulate(taught, seeds)
        else:
            sums = self.judge([next(taught) for _ in seeds], seeds, consumed_samples)
        self._mark()
        scale_before = float(getattr(self.optimizer_wrapper, "loss_scale", 1.0))
        at_smallest = self._scale_is_smallest()
        zeros = None if self.count_zeros is None else self.count_zeros(self)
        norm, held = self.update()
        self._mark()
        losses = self.mean_losses(sums, micro_batches)
        exhausted = at_smallest and held is True
        total, of_rank = self.spec.total(losses), sums.sum()
        return StepResult(total, losses, norm, held, scale_before, exhausted, of_rank, zeros)

    def _mark(self) -> None:
        if not self.timed:
            return
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def drop_gradients(self) -> None:
        """Discard the gradients from :meth:`Backend.accumulate`, so that it can be called again."""
        drop_gradients(self.optimizer_wrapper)
        self.kernels.forget_step()

    def norm_before_update(self) -> Tensor | None:
        """Return the global gradient norm, a scalar on the device. Return None if only DeepSpeed's
        own step computes it: with fp16, and with SGD or offloaded state at ZeRO 1 to 3."""
        if self._async_step is not None:
            return self._async_step.measure()
        alone = self.optimizer_wrapper is self.optimizer
        return gradient_norm(list(self.trained), self.mesh) if alone else None

    def prepare(self, micro_batches: int) -> None:
        if not self.backend.model.training:  # slow: train() visits every module
            self.engine.train()
        if self.switch is not None:
            self.switch(True)
        context = self.mesh.group("context").size  # DeepSpeed counts a sample once per rank
        self.engine.set_train_batch_size(self._samples_per_round * context * micro_batches)
        if not getattr(self.optimizer_wrapper, "gathers_late", False):
            self.kernels.refresh()

    def mean_losses(self, sums: Tensor, micro_batches: int) -> dict[str, Tensor]:
        """Return the mean of each loss over all ranks, given each rank's sums from accumulation."""
        means = self._mean_over_ranks(sums / micro_batches)
        return dict(zip(self.spec.losses, means, strict=True))

    def _dropout_seeds(self, consumed_samples: int, micro_batches: int) -> list[int | None]:
        model, per_round = self.config.model, self._samples_per_round
        dropped = model.hidden_dropout or model.attention.attention_dropout
        if not dropped and not self.spec.draws:
            return [None] * micro_batches
        first = consumed_samples + self.mesh.samples.rank * per_round // self.mesh.samples.size
        seed = self.config.training.seed
        return [dropout_seed(seed, first + n * per_round) for n in range(micro_batches)]

    @contextmanager
    def replacing_state(self) -> Iterator[None]:
        """Allow a checkpoint to be loaded within this context after training steps. Resets what
        steps leave besides weights and optimizer state."""
        if self._async_step is not None:
            self._async_step.held = None
        whole = self.optimizer_wrapper.persistent_parameters if self.stage == 3 else []
        if whole:  # small parameters, which every rank keeps whole between steps
            whole[0].partition(whole)
        yield
        if whole:
            whole[0].all_gather(whole)

    def prepare_evaluation(self) -> None:
        self.backend.await_weights()
        if self.switch is not None:
            self.switch(False)
        self.engine.eval()

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the parameters, which would keep the engine in memory."""
        self.backend.await_weights()
        self.engine.destroy()

    @record_function("megatron::optimizer")
    def update(self) -> tuple[Tensor | float, Tensor | bool]:
        """Clip the gradients and update the weights. Return the norm before clipping, and whether
        the update was skipped (1.0 or 0.0 on the device if steps are asynchronous)."""
        self.kernels.end_step()
        if self._async_step is not None:
            self._async_step.prepare()
            self.backend.apply()
            assert self._async_step.held is not None
            return self._async_step.norm, self._async_step.held
        if self.optimizer_wrapper is self.optimizer:
            return self._update_unpartitioned()
        self.backend.apply()
        if self.optimizer_wrapper.overflow:
            return float("inf"), True
        self._grow_scale()
        return float(self.engine.get_global_grad_norm()), False

    def _update_unpartitioned(self) -> tuple[float, bool]:
        params = list(self.trained)
        norm = gradient_norm(params, self.mesh)
        finite = bool(torch.isfinite(norm))
        if not finite:
            for param in params:
                param.grad = None
        elif self.config.optimizer.clip_grad > 0:
            factor = clipping_factor(norm, self.config.optimizer.clip_grad)
            torch._foreach_mul_([p.grad for p in params if p.grad is not None], factor)
        self.backend.apply()
        return (float(norm), False) if finite else (float("inf"), True)

    @property
    def optimizer_wrapper(self) -> Any:
        """DeepSpeed's wrapper around :attr:`optimizer`, or this optimizer itself if unwrapped."""
        return self.engine.optimizer
