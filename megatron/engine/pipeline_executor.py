"""Runs any pipeline schedule on DeepSpeed's pipeline engine and its instructions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from megatron.engine.json_keys import Json
from megatron.engine.mpu import Mpu
from megatron.engine.pipeline_module import StageModule
from megatron.engine.program import Batch, ModelInputs, ModelSpec
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline_messages import Exchange, Transfer
from megatron.parallel.pipeline_schedules import Action

_Key = tuple[int, int]
"""(stage, micro batch)."""
_Arrival = tuple[bool, _Key]
"""(whether it is a gradient, for which stage and micro batch)."""


class PipelineExecutor(PipelineEngine):
    """DeepSpeed's pipeline engine with instructions that know several stages per process.

    Every process reads every micro batch; hidden states and their gradients travel between stages.
    Sends and receives of one moment are posted as one batch, in an order that is the same on all
    processes. A receive is waited for where it is needed, a send two batches later.

    Args:
        module: this process's stages.
        optimizer: torch's optimizer.
        settings: DeepSpeed's configuration.
        program: the model's inputs.
        mesh: the layout's process groups.

    Attributes:
        executed: the forward and backward passes of the last run, in order.
        hidden_dtype: number format of what travels between stages.
    """

    def __init__(
        self,
        module: StageModule,
        optimizer: torch.optim.Optimizer,
        settings: Json,
        program: ModelSpec,
        mesh: Mesh,
    ) -> None:
        # Not DeepSpeed's own grid: its groups have no --distributed-timeout-minutes.
        mpu = Mpu(mesh)
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=mpu,
            config=settings,
            config_class=DeepSpeedConfig(settings, mpu),
            dist_init_required=False,
        )
        self._program, self._mesh = program, mesh
        self._last_stage = len(module.parts) - 2
        self.hidden_dtype = next(module.parameters()).dtype
        self.executed: list[Action] = []
        # NCCL wants every rank of a group in its first call; later batches are for some of them.
        dist.barrier(group=mesh.pipeline.handle)

    def run(
        self,
        plan: Sequence[Action | Exchange],
        batches: Iterator[Batch],
        seeds: Sequence[int | None],
        hidden_shape: tuple[int, ...],
    ) -> Tensor:
        """Executes this process's part of a schedule.

        Args:
            plan: forward and backward passes, and exchanges between them. Without gradients
                there are forward passes only; with them, gradients are averaged over data-parallel
                ranks and over copies of tied weights at the end.
            batches: the micro batches.
            seeds: what the dropout masks of each micro batch derive from.
            hidden_shape: shape of what travels between stages in this run.

        Returns:
            Sum of the losses on the process with the last stage, zero elsewhere.
        """
        self._batches, self._seeds, self._hidden_shape = batches, seeds, hidden_shape
        self._loaded: dict[int, ModelInputs] = {}
        self._next_batch_number = 0
        self._inputs: dict[_Key, Tensor] = {}
        self._outputs: dict[_Key, Tensor] = {}
        self._gradients: dict[_Key, Tensor] = {}
        self._queue: list[tuple[dist.P2POp, _Arrival | None]] = []
        self._arriving: dict[_Arrival, dist.Work] = {}
        self._leaving: list[list[tuple[dist.Work, Tensor]]] = []
        self._total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.executed = []
        self._exec_schedule(_Instructions(plan, torch.is_grad_enabled()))
        self._finish_sends()
        assert not self._arriving and not self._queue
        del self._batches, self._loaded, self._inputs, self._outputs, self._gradients
        return self._total

    def apply(self) -> None:
        """Updates the weights."""
        self._exec_optimizer_step()

    def _load(self, micro_batch: int) -> ModelInputs:
        while self._next_batch_number <= micro_batch:
            batch = next(self._batches).to(self.device, non_blocking=True)
            self._loaded[self._next_batch_number] = self._program.inputs(batch)
            self._next_batch_number += 1
        return self._loaded[micro_batch]

    def _exec_forward_pass(self, buffer_id: int, stage: int) -> None:
        key = (stage, buffer_id)
        inputs = self._load(buffer_id)
        hidden = inputs.tokens_BS if stage == 0 else self._arrived(False, key, self._inputs)
        with autocast_if_enabled(self):
            output = self.module(
                stage,
                hidden,
                inputs.position_ids_BS,
                inputs.document_ids_BS,
                self._seeds[buffer_id],
                inputs.targets if stage == self._last_stage else None,
            )
        if stage == self._last_stage:
            self._total += output.detach()
        elif stage + 1 in self.module.runs:
            self._inputs[stage + 1, buffer_id] = _leaf(output.detach())
        self._outputs[key] = output
        if stage == max(self.module.runs):
            del self._loaded[buffer_id]
        if not torch.is_grad_enabled():
            # Nothing comes back; what another process waits for is kept until it is sent.
            self._inputs.pop(key, None)
            if stage == self._last_stage or stage + 1 in self.module.runs:
                del self._outputs[key]
        self.executed.append(Action(False, stage, buffer_id))

    def _exec_backward_pass(self, buffer_id: int, stage: int) -> None:
        key, after = (stage, buffer_id), (stage + 1, buffer_id)
        output, gradient = self._outputs.pop(key), None
        if stage == self._last_stage:
            output = output / self.gradient_accumulation_steps()
            if isinstance(self.optimizer, ZeROOptimizer):
                output = self.optimizer.scale_if_loss(output)
        elif stage + 1 in self.module.runs:
            gradient = self._inputs.pop(after).grad
        else:
            gradient = self._arrived(True, key, self._gradients)
            del self._gradients[key]
        if isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.clear_backward_seen_flag()
        self._running_engine_backward = True
        try:
            self._backward_prologue()
            torch.autograd.backward(output, gradient)
            self._backward_epilogue()
        finally:
            self._running_engine_backward = False
        self.executed.append(Action(True, stage, buffer_id))

    def _exec_send_activations(self, buffer_id: int, transfer: Transfer) -> None:
        key = (transfer.from_stage, buffer_id)
        output = self._outputs[key] if torch.is_grad_enabled() else self._outputs.pop(key)
        self._post(dist.isend, output.detach().contiguous(), transfer.target, None)

    def _exec_send_grads(self, buffer_id: int, transfer: Transfer) -> None:
        gradient = self._inputs.pop((transfer.from_stage, buffer_id)).grad
        assert gradient is not None
        self._post(dist.isend, gradient.contiguous(), transfer.target, None)

    def _exec_recv_activations(self, buffer_id: int, transfer: Transfer) -> None:
        key = (transfer.to_stage, buffer_id)
        self._inputs[key] = _leaf(self._empty())
        self._post(dist.irecv, self._inputs[key].detach(), transfer.source, (False, key))

    def _exec_recv_grads(self, buffer_id: int, transfer: Transfer) -> None:
        key = (transfer.to_stage, buffer_id)
        self._gradients[key] = self._empty()
        self._post(dist.irecv, self._gradients[key], transfer.source, (True, key))

    def _empty(self) -> Tensor:
        return torch.empty(self._hidden_shape, dtype=self.hidden_dtype, device=self.device)

    def _post(self, operation: Any, tensor: Tensor, rank: int, key: _Arrival | None) -> None:
        assert tensor.shape == self._hidden_shape and tensor.dtype == self.hidden_dtype
        pipeline = self._mesh.pipeline
        peer = dist.P2POp(operation, tensor, pipeline.ranks[rank], group=pipeline.handle)
        self._queue.append((peer, key))

    def _exec_commit_p2p(self) -> None:
        # What was sent two batches ago should have arrived, and can be let go of.
        self._finish_sends(keep=2)
        operations = [operation for operation, _ in self._queue]
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL answers for the batch as a whole
            works = works[:1] * len(operations)
        leaving = []
        for work, (operation, key) in zip(works, self._queue, strict=True):
            if key is None:
                leaving.append((work, operation.tensor))
            else:
                self._arriving[key] = work
        self._leaving.append(leaving)
        self._queue = []

    def _finish_sends(self, keep: int = 0) -> None:
        """Waits for the sends of all batches but the last ``keep``."""
        while len(self._leaving) > keep:
            for work, _ in self._leaving.pop(0):
                work.wait()

    def _arrived(self, gradient: bool, key: _Key, place: dict[_Key, Tensor]) -> Tensor:
        work = self._arriving.pop((gradient, key), None)
        if work is not None:
            work.wait()
        return place[key]

    def _exec_reduce_tied_grads(self) -> None:
        """Sums the gradients of tied weights over the stages that hold a copy.

        DeepSpeed's own instruction looks in ``weight.grad``, where there is nothing once fp16
        gradients were added up in float32.
        """
        data = self._mesh.data
        for weight, tied_group in self.module.get_tied_weights_and_groups():
            gradient = self._accumulated(weight)
            # The copies must stay equal bit by bit. DeepSpeed averages over data ranks in buckets
            # that differ between the stages, and with them the order of a sum of three or more;
            # of addends that are equal already the order does not matter.
            if data.size > 1:
                dist.all_reduce(gradient, group=data.handle)
                gradient /= data.size
            dist.all_reduce(gradient, group=tied_group)

    def _accumulated(self, weight: torch.nn.Parameter) -> Tensor:
        if self.using_bf16_optimizer:
            return weight._hp_grad  # type: ignore[attr-defined]
        if isinstance(self.optimizer, ZeROOptimizer):
            return self.optimizer.get_gradient_for_reduction(weight)
        assert weight.grad is not None
        return weight.grad

    _INSTRUCTION_MAP = {
        instructions.ForwardPass: _exec_forward_pass,
        instructions.BackwardPass: _exec_backward_pass,
        instructions.SendActivation: _exec_send_activations,
        instructions.RecvActivation: _exec_recv_activations,
        instructions.SendGrad: _exec_send_grads,
        instructions.RecvGrad: _exec_recv_grads,
        instructions.CommitP2P: _exec_commit_p2p,
        instructions.ReduceTiedGrads: _exec_reduce_tied_grads,
        instructions.ReduceGrads: PipelineEngine._exec_reduce_grads,
    }


def _leaf(x: Tensor) -> Tensor:
    return x.requires_grad_(torch.is_grad_enabled())


class _Instructions(instructions.PipeSchedule):
    """One process's plan in DeepSpeed's instructions; a buffer is a micro batch.

    The optimizer's step is not among them: the trainer measures and clips gradients before it.
    """

    def __init__(self, plan: Sequence[Action | Exchange], training: bool) -> None:
        self._plan, self._training = plan, training

    def num_pipe_buffers(self) -> int:
        """None of DeepSpeed's buffers are used."""
        return 0

    def steps(self) -> Iterator[list[instructions.PipeInstruction]]:
        """Instructions, a list for each entry of the plan."""
        for entry in self._plan:
            if isinstance(entry, Action):
                kind = instructions.BackwardPass if entry.backward else instructions.ForwardPass
                yield [kind(entry.micro_batch, stage=entry.stage)]
            else:
                yield [*map(_send, entry.sends), *map(_receive, entry.receives),
                       instructions.CommitP2P()]  # fmt: skip
        if self._training:
            yield [instructions.ReduceTiedGrads(), instructions.ReduceGrads()]


def _send(transfer: Transfer) -> instructions.PipeInstruction:
    kind = instructions.SendGrad if transfer.gradient else instructions.SendActivation
    return kind(transfer.micro_batch, transfer=transfer)


def _receive(transfer: Transfer) -> instructions.PipeInstruction:
    kind = instructions.RecvGrad if transfer.gradient else instructions.RecvActivation
    return kind(transfer.micro_batch, transfer=transfer)
