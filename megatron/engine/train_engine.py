"""One optimizer step, and evaluation, on one of DeepSpeed's engines."""

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

from megatron.checkpoint.manifest import BaseRecord
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
from megatron.parallel.mesh import Group, Mesh
from megatron.parallel.random import dropout_seed


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step; what is on the device may still be computed, and reading it
    waits.

    Attributes:
        loss: the minimised number, the weighted sum of ``losses``; a scalar on the device.
        losses: means over micro batches and data-parallel ranks by name, scalars on the device.
        grad_norm: global 2-norm of the gradients before clipping, infinite when they are not
            finite; a scalar on the device, or a number.
        skipped: 1 if the gradients were not finite and no weight changed, else 0; a scalar on the
            device, or a bool.
        scale_exhausted: whether it was skipped at the smallest loss scale, so that the next ones
            will be too.
        own_loss: sum of the losses of this rank's micro batches, a scalar on the device; 0 on
            stages of a pipeline that do not compute them.
        zeros: number of elements of the gradients that are zero, a scalar on the device; None
            without :attr:`TrainEngine.count_zeros`.
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
    """A model over the ranks of a mesh, whose numbers can be measured.

    Args:
        names: canonical name of each parameter of which this process has a part.
        kernels: what the kernels of linear layers keep.

    Attributes:
        stage: the ZeRO stage that runs.
        buffers: canonical name of each buffer of this process, to the buffer.
        stored_states: how main weights and moments are stored; None for float32.
        base: the model that the adapters of ``--lora`` belong to; None without.
        teach: adds to each of so many micro batches what the losses need of another model; None if
            they need nothing.
    """

    stored_states: StateStore | None = None
    base: BaseRecord | None = None
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
        """(canonical name, weight) of this process's weights that are no parameters, since fewer
        bits are stored of them: a ``weight`` fills itself of a tensor."""

    @property
    def model(self) -> nn.Module:
        """The layers of this process. Here and in the next two are the weights of the last update:
        who reads a weight outside of forward passes comes by one of them."""
        self.backend.await_weights()
        return self.backend.model

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """Canonical name of each parameter of which this process has a part."""
        self.backend.await_weights()
        return self._names

    @property
    def trained(self) -> Mapping[nn.Parameter, str]:
        """Names of the parameters that are trained; others are frozen, without gradients,
        optimizer state or a place in checkpoints."""
        self.backend.await_weights()
        return self._trained

    @property
    def sequences(self) -> list[LayerSequence]:
        """The layers of this process as they run, a sequence for each pipeline stage."""
        return self.backend.sequences

    def evaluate(
        self, batches: Iterator[Batch], count: int, measure: Measure | None = None
    ) -> dict[str, float]:
        """Return the numbers that a measure reports, from the means by name over ``count`` of each
        data-parallel rank's batches; by default that of the model's evaluations, the losses."""
        measure = measure or self.spec.evaluated
        if measure is None:
            batches, measure = self.taught(batches, count), self.spec.loss_measure
        assert not measure.per_sample
        sums = torch.zeros(len(measure.names), dtype=torch.float64, device=self.device)
        means = self._mean_over_ranks(
            reduce(add, self._measured(batches, count, measure), sums) / count
        )
        return measure.report(dict(zip(measure.names, means.tolist(), strict=True)))

    def rows(self, batches: Iterator[Batch], count: int, measure: Measure) -> Tensor:
        """The numbers of each sample, float64 [D, ``count``, B, N] or [D, ``count``, B, N, K], over
        ``count`` batches of each of D data-parallel ranks, the same on every rank; on the CPU. All
        batches have as many samples, B."""
        assert measure.per_sample
        measured = self._measured(batches, count, measure)
        own = torch.stack(measured) if measured else torch.zeros((), device=self.device).double()
        return _of_all(self._from_last_stage(own), self.mesh.samples).cpu()

    def taught(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return ``count`` micro batches with the inputs that the losses need."""
        return batches if self.teach is None else self.teach(batches, count)

    @record_function("megatron::evaluate")
    @torch.no_grad()
    def _measured(self, batches: Iterator[Batch], count: int, measure: Measure) -> list[Tensor]:
        self.prepare_evaluation()
        self.kernels.refresh()
        return self.backend.evaluate(batches, count, measure)

    def prepare_evaluation(self) -> None:
        """Turns off what is for training only."""
        if self.model.training:
            self.model.eval()

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        """Sums over pipeline stages, all but one of which have zeros; means over data ranks."""
        for group in (self.mesh.pipeline, self.mesh.samples):
            if group.size > 1:
                dist.all_reduce(values, group=group.handle)
        return values / self.mesh.samples.size

    def _from_last_stage(self, rows: Tensor) -> Tensor:
        """The rows of the pipeline stage that has them, which has dimensions, on every stage."""
        pipeline = self.mesh.pipeline
        if pipeline.size == 1:
            return rows
        shape = torch.zeros(_DIMENSIONS, dtype=torch.int64, device=self.device)
        shape[: rows.dim()] = torch.tensor(rows.shape, device=self.device)
        dist.all_reduce(shape, op=dist.ReduceOp.MAX, group=pipeline.handle)
        if not rows.dim():
            rows = rows.new_zeros([size for size in shape.tolist() if size])
        dist.all_reduce(rows, group=pipeline.handle)
        return rows


_DIMENSIONS = 4


def _of_all(rows: Tensor, group: Group) -> Tensor:
    """Gather the rows of each rank, in order."""
    if group.size == 1:
        return rows[None]
    parts = [torch.empty_like(rows) for _ in range(group.size)]
    dist.all_gather(parts, rows.contiguous(), group=group.handle)
    return torch.stack(parts)


class TrainEngine(ModelEngine):
    """A model in training; made by :func:`build_engine`. Further arguments than of the base:

    Args:
        asynchronous: whether steps are :class:`AsyncOptimizerStep`.

    Attributes:
        look_ahead: makes a step's micro batches of the next ones, before their first pass; None for
            these as they are.
        judge: calls :meth:`Backend.accumulate` for a step, perhaps several times; gets its micro
            batches, their seeds, and the number of samples before, and returns the sums.
        count_zeros: counts zeros in the gradients of the next step, on every rank; None for none.
        timed: whether steps leave ``marks``: times before their passes, after them and after the
            update, in seconds, or events on a CUDA device, which it reaches later.
        view: makes the :class:`Partition` of a tensor that the optimizer updates and of its states,
            in float32, where a checkpoint has other weights than those that are trained.
        kept: by name, see :class:`KeptState`.
        switch: called with True before passes of training, with False before evaluations: sets
            the weights that the model computes with, where they differ.
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
                keys=None
                if stored_states is None
                else stored_states.keys(config.training.seed, self.trained, mesh.coordinates),
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
        """Takes ``micro_batches`` batches through the model and updates the weights once, without
        synchronizing with the device, except for the numbers that fp16, SGD and offloaded state
        need, at stage 3, and with ``overlap_comm``. ``consumed_samples`` counts those of all
        earlier steps."""
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
        """Forgets what :meth:`Backend.accumulate` has left, so that it can compute it again."""
        drop_gradients(self.optimizer_wrapper)
        self.kernels.forget_step()

    def norm_before_update(self) -> Tensor | None:
        """The norm of the gradients, a scalar on the device; None where only DeepSpeed's own step
        finds it (fp16; SGD and offloaded state at ZeRO 1 to 3)."""
        if self._async_step is not None:
            return self._async_step.measure()
        alone = self.optimizer_wrapper is self.optimizer
        return gradient_norm(list(self.trained), self.mesh) if alone else None

    def prepare(self, micro_batches: int) -> None:
        if not self.backend.model.training:  # train() visits every module
            self.engine.train()
        if self.switch is not None:
            self.switch(True)
        context = self.mesh.group("context").size  # DeepSpeed counts the samples of each rank
        self.engine.set_train_batch_size(self._samples_per_round * context * micro_batches)
        if not getattr(self.optimizer_wrapper, "gathers_late", False):
            self.kernels.refresh()

    def mean_losses(self, sums: Tensor, micro_batches: int) -> dict[str, Tensor]:
        """Means of the losses by name, from the sums of each rank's :meth:`Backend.accumulate`."""
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
        """Within it a checkpoint can be loaded after steps have been trained: they leave more than
        weights and optimizer state."""
        if self._async_step is not None:
            self._async_step.held = None
        whole = self.optimizer_wrapper.persistent_parameters if self.stage == 3 else []
        if whole:  # small ones, which every rank keeps whole between steps
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
        """Removes DeepSpeed's hooks from the parameters; they would keep the engine alive."""
        self.backend.await_weights()
        self.engine.destroy()

    @record_function("megatron::optimizer")
    def update(self) -> tuple[Tensor | float, Tensor | bool]:
        """Clip and apply the gradients; return their norm, and True if no weight changed."""
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
        """DeepSpeed's optimizer around :attr:`optimizer`, or the same object (stage 0, not
        fp16)."""
        return self.engine.optimizer
