"""Executes any pipeline schedule, for evaluation or for training in DeepSpeed's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor
from torch.profiler import record_function

from megatron.engine.deepspeed_json import Json
from megatron.engine.environment import Mpu
from megatron.engine.pipeline_module import Boundary, StageModule, check_agreement
from megatron.engine.update.reduction import GradientReduction
from megatron.model.layer_list import LayerState
from megatron.model.spec import Batch, Measure, ModelSpec
from megatron.parallel.later_products import LaterProducts, add_products, products_later
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline_schedules import WEIGHTS, Action
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.parallel.timeline import Exchange, Transfer
from megatron.util.phases import moved

_Key = tuple[int, int]
"""Stage index and micro batch index."""
_Arrival = tuple[bool, _Key]
"""Tensors that arrive: True for gradients or False for inputs, and their stage and micro batch."""
_Tensors = tuple[Tensor, ...]
"""Tensors that cross one boundary between stages, in the order of :attr:`Boundary.names`."""


class PipelinePasses:
    """Runs a process's passes through its stages in the order of any schedule, with several stages
    per process. This base class computes no gradients. Only the boundaries' tensors and their
    gradients are sent between stages. Simultaneous sends and receives form one batch, in the same
    order on all processes. A process waits for a receive when it needs the result, and keeps sent
    tensors until the send has completed. ``executed`` lists the passes of the last run."""

    module: StageModule
    device: torch.device

    def __init__(self, module: StageModule, device: torch.device) -> None:
        self.module, self.device = module, device

    def connect(self, spec: ModelSpec, tensor: TensorParallel, mesh: Mesh) -> None:
        """Prepare communication. Collective: all processes of the pipeline must call this."""
        self._spec, self._tensor, self._mesh = spec, tensor, mesh
        self._last_stage = len(self.module.parts) - 2
        self._agreed: set[tuple[Boundary, ...]] = set()
        self.executed: list[Action] = []
        # NCCL needs every rank of a group in its first call, unlike in later batches of transfers.
        handle = mesh.transfers.handle
        on_gpus = dist.get_backend(handle) == "nccl"
        dist.barrier(group=handle, device_ids=[torch.cuda.current_device()] if on_gpus else None)

    def run(
        self,
        plan: Sequence[Action | Exchange],
        batches: Iterator[Batch],
        seeds: Sequence[int | None],
        measure: Measure,
    ) -> dict[int, Tensor]:
        """Execute this process's passes in a schedule. All micro batches must have the same shape.
        Return the values of ``measure`` by micro batch index, in the order of their passes; empty
        on processes without the last stage. In training, also average gradients over data-parallel
        ranks and sum them over copies of tied weights."""
        self._batches, self._seeds, self._measure = batches, seeds, measure
        self._loaded: dict[int, tuple[Any, LayerState]] = {}
        self._next_batch_number = 0
        self._inputs: dict[_Key, _Tensors] = {}
        self._outputs: dict[_Key, _Tensors] = {}
        self._gradients: dict[_Key, _Tensors] = {}
        self._queue: list[tuple[dist.P2POp, _Arrival | None]] = []
        self._arriving: dict[_Arrival, list[dist.Work]] = {}
        self._leaving: list[list[tuple[dist.Work, Tensor]]] = []
        passes = [entry for entry in plan if isinstance(entry, Action)]
        self._last_passes = {a.stage: a for a in passes if a.backward}
        later = (a for a in passes if a.part == WEIGHTS)
        self._later: dict[_Key, LaterProducts] = {(a.stage, a.micro_batch): [] for a in later}
        numbers: dict[int, Tensor] = {}
        self._found = numbers
        self._boundaries = self._agree_on_boundaries()
        self.executed = []
        for entry in plan:
            moved()
            if isinstance(entry, Exchange):
                self._exchange(entry)
            elif entry.part == WEIGHTS:
                self.weight_pass(entry)
            elif entry.backward:
                self.backward_pass(entry)
            else:
                self.forward_pass(entry)
        if torch.is_grad_enabled():
            self.reduce_gradients()
        self.wait_for_sends()
        assert not self._arriving and not self._queue and not self._later
        del self._batches, self._loaded, self._inputs, self._outputs, self._gradients, self._found
        return numbers

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that sets a stage's compute dtype if it is not the weights' dtype."""
        return contextlib.nullcontext()

    def backward_pass(self, action: Action) -> None:
        """Run the backward pass of a micro batch through a stage."""
        raise AssertionError("evaluations have no backward passes")

    def weight_pass(self, action: Action) -> None:
        """Compute the weight gradients that the backward pass of a micro batch has deferred."""
        raise AssertionError("evaluations have no backward passes")

    def leaving_weights(self, key: _Key) -> contextlib.AbstractContextManager[Any]:
        """Return a context for running a stage's pass. If the schedule has separate weight passes,
        the context defers the GEMMs of weight gradients."""
        left = self._later.get(key)
        return contextlib.nullcontext() if left is None else products_later(left)

    def reduce_gradients(self) -> None:
        """Reduce the accumulated gradients. Called after the last pass."""
        raise AssertionError("evaluations have no gradients")

    def _load(self, micro_batch: int) -> tuple[Any, LayerState]:
        while self._next_batch_number <= micro_batch:
            with record_function("megatron::data"):
                batch = next(self._batches)
            batch = batch.to(self.device, non_blocking=True)
            state = self._measure.start(self._spec.begin(batch))
            seed = self._seeds[self._next_batch_number]
            self._loaded[self._next_batch_number] = batch, state.changed(dropout_seed=seed)
            self._next_batch_number += 1
        return self._loaded[micro_batch]

    def _agree_on_boundaries(self) -> tuple[Boundary, ...]:
        """Derive the boundaries from this process's first micro batch, and check once for each
        shape that all processes agree."""
        _, state = self._load(0)
        dtype = next(self.module.parameters()).dtype
        boundaries = tuple(
            Boundary.of(self._spec.travels(state, self._tensor, place), dtype, self._spec.widened)
            for place in self.module.parts[1:-1]
        )
        if boundaries not in self._agreed:
            check_agreement(boundaries, self._mesh.pipeline)
            self._agreed.add(boundaries)
        return boundaries

    @record_function("megatron::forward")
    def forward_pass(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        key = (stage, micro_batch)
        batch, state = self._load(micro_batch)
        if stage > 0:
            before = self._boundaries[stage - 1]
            state = before.put_into(state, self.wait_for_arrival(False, key, self._inputs))
        with self.autocast(), self.leaving_weights(key):
            state = self.module(stage, state)
        if stage == self._last_stage:
            self._found[micro_batch] = self._measure.of(state, batch)
            if torch.is_grad_enabled():
                self._outputs[key] = (self._spec.total(state.losses),)
        else:
            self._outputs[key] = self._boundaries[stage].taken_from(state)
            if stage + 1 in self.module.sequences:
                arrived = tuple(_leaf(x.detach()) for x in self._outputs[key])
                self._inputs[stage + 1, micro_batch] = arrived
        if stage == max(self.module.sequences):
            del self._loaded[micro_batch]
        if not torch.is_grad_enabled():
            # There is no backward pass. Keep only outputs for other processes, until sent.
            self._inputs.pop(key, None)
            if stage + 1 in self.module.sequences:
                del self._outputs[key]
        self.executed.append(action)

    def _exchange(self, exchange: Exchange) -> None:
        for transfer in exchange.sends:
            self._send(transfer)
        for transfer in exchange.receives:
            self._receive(transfer)
        self._free_what_was_sent()
        operations = [operation for operation, _ in self._queue]
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL returns a single handle for the whole batch
            works = works[:1] * len(operations)
        leaving = []
        for work, (operation, key) in zip(works, self._queue, strict=True):
            if key is None:
                leaving.append((work, operation.tensor))
            else:
                self._arriving.setdefault(key, []).append(work)
        self._leaving.append(leaving)
        self._queue = []

    def _send(self, transfer: Transfer) -> None:
        key = (transfer.from_stage, transfer.micro_batch)
        if transfer.gradient:
            inputs = self._inputs.pop(key)
            tensors = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        else:
            outputs = self._outputs[key] if torch.is_grad_enabled() else self._outputs.pop(key)
            tensors = [x.detach() for x in outputs]
        for tensor in tensors:
            self._post(dist.isend, tensor.contiguous(), transfer.target, None)

    def _receive(self, transfer: Transfer) -> None:
        key = (transfer.to_stage, transfer.micro_batch)
        boundary = self._boundaries[min(transfer.from_stage, transfer.to_stage)]
        tensors = boundary.empty(self.device)
        if transfer.gradient:
            self._gradients[key] = tensors
        else:
            self._inputs[key] = tuple(_leaf(x) for x in tensors)
        for tensor in tensors:
            self._post(dist.irecv, tensor.detach(), transfer.source, (transfer.gradient, key))

    def _post(self, operation: Any, tensor: Tensor, rank: int, key: _Arrival | None) -> None:
        group = self._mesh.transfers
        peer = dist.P2POp(operation, tensor, group.ranks[rank], group=group.handle)
        self._queue.append((peer, key))

    def _free_what_was_sent(self) -> None:
        """Release tensors whose send has completed. On a GPU, waiting for a send would make all
        later computation wait for a slow neighbour. gloo reports a completed send only to a caller
        that waits; there, wait for all but the last two batches, which should have arrived."""
        if self.device.type != "cuda":
            self.wait_for_sends(keep=2)
        while self._leaving and all(work.is_completed() for work, _ in self._leaving[0]):
            self._leaving.pop(0)

    @record_function("megatron::receive")
    def wait_for_sends(self, keep: int = 0) -> None:
        while len(self._leaving) > keep:
            for work, _ in self._leaving.pop(0):
                work.wait()

    @record_function("megatron::receive")
    def wait_for_arrival(self, gradient: bool, key: _Key, place: dict[_Key, _Tensors]) -> _Tensors:
        """Wait until a stage's inputs (or gradients) for a micro batch arrive, and return them."""
        for work in self._arriving.pop((gradient, key), ()):
            work.wait()
        return place[key]


class PipelineExecutor(PipelinePasses, PipelineEngine):
    """DeepSpeed's pipeline engine, running passes in the order of our schedules."""

    def __init__(
        self,
        module: StageModule,
        optimizer: torch.optim.Optimizer,
        settings: Json,
        spec: ModelSpec,
        tensor: TensorParallel,
        mesh: Mesh,
    ) -> None:
        # Replaces DeepSpeed's own grid, whose groups lack --distributed-timeout-minutes.
        mpu = Mpu(mesh)
        PipelineEngine.__init__(
            self,
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=mpu,
            config=settings,
            config_class=DeepSpeedConfig(settings, mpu),
            dist_init_required=False,
        )
        self.connect(spec, tensor, mesh)

    def apply(self) -> None:
        self._exec_optimizer_step()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return autocast_if_enabled(self)

    def reduce_gradients(self) -> None:
        if self._reduction is None:
            self._reduce_tied_gradients()
        self._exec_reduce_grads()

    @property
    def _reduction(self) -> GradientReduction | None:
        """This trainer's gradient reduction; None if DeepSpeed reduces (no ZeRO, or offloading)."""
        return getattr(self.optimizer, "reduction", None)

    @record_function("megatron::backward")
    def backward_pass(self, action: Action) -> None:
        key, after = (action.stage, action.micro_batch), (action.stage + 1, action.micro_batch)
        outputs = self._outputs.pop(key)
        gradients: Sequence[Tensor | None] = (None,)
        if action.stage == self._last_stage:
            (total,) = outputs
            total = total / self.gradient_accumulation_steps()
            if isinstance(self.optimizer, ZeROOptimizer):
                total = self.optimizer.scale_if_loss(total)
            outputs = (total,)
        else:
            if after[0] in self.module.sequences:
                gradients = [x.grad for x in self._inputs.pop(after)]
            else:
                gradients = self.wait_for_arrival(True, key, self._gradients)
                del self._gradients[key]
            # Some tensors at a boundary need no gradient or get none.
            pairs = zip(outputs, gradients, strict=True)
            kept = [(x, grad) for x, grad in pairs if x.requires_grad and grad is not None]
            # If all earlier layers are frozen, no tensor needs one.
            outputs, gradients = zip(*kept, strict=True) if kept else ((), ())
        complete = key not in self._later
        with self._backward(action, complete), self.leaving_weights(key):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        self.executed.append(action)

    @record_function("megatron::backward")
    def weight_pass(self, action: Action) -> None:
        with self._backward(action, complete=True):
            add_products(self._later.pop((action.stage, action.micro_batch)))
        self.executed.append(action)

    @contextlib.contextmanager
    def _backward(self, action: Action, complete: bool) -> Iterator[None]:
        """Return a context for a backward pass, in which DeepSpeed accumulates gradients.
        ``complete`` tells whether no later pass adds to those of the stage and micro batch."""
        reduction = self._reduction if complete else None
        if isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.clear_backward_seen_flag()
        self._running_engine_backward = True
        try:
            self._backward_prologue()
            if reduction is not None:
                reduction.begin_pass(self._last_passes[action.stage] == action, action.stage)
            yield
            if reduction is not None:
                reduction.end_pass()
            self._backward_epilogue()
        finally:
            self._running_engine_backward = False

    def _reduce_tied_gradients(self) -> None:
        """Sum the gradients of tied parameters over the stages that have a copy. DeepSpeed's own
        method reads ``weight.grad``, which is None if fp16 gradients are summed in float32."""
        for weight, tied_group in self.module.tied_parameters():
            if not weight.requires_grad:
                continue  # frozen on every stage with a copy
            gradient = self._accumulated(weight)
            # The copies must stay bitwise equal. DeepSpeed averages in buckets that differ between
            # the stages, and so does its order of summation. Averaging over the replicas first
            # (experts have fewer) makes all addends equal, so that the order no longer matters.
            replicas = self._mesh.replicas(shard_of(weight))
            if replicas.size > 1:
                dist.all_reduce(gradient, group=replicas.handle)
                gradient /= replicas.size
            dist.all_reduce(gradient, group=tied_group)

    def _accumulated(self, weight: torch.nn.Parameter) -> Tensor:
        if isinstance(self.optimizer, ZeROOptimizer):
            return self.optimizer.get_gradient_for_reduction(weight)
        assert weight.grad is not None
        return weight.grad


def _leaf(x: Tensor) -> Tensor:
    return x.requires_grad_(torch.is_grad_enabled())
