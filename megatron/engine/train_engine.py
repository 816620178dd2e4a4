"""One optimizer step, and evaluation, on DeepSpeed's engine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.engine.deepspeed_json import Json, for_engine
from megatron.engine.environment import is_main_process
from megatron.engine.gradient_norm import clip_gradients, gradient_norm
from megatron.engine.mpu import Mpu
from megatron.engine.optimizer import build_optimizer, set_rates
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.groups import Group, ProcessGroups
from megatron.parallel.random import seed_micro_batch
from megatron.parallel.shard import init_of, shard_of


class Batch(Protocol):
    """A micro batch that can move to a device."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """The batch on ``device``."""
        ...


@dataclass(frozen=True)
class ModelProgram:
    """What the engine runs: a model and what to do with its batches.

    Attributes:
        build: makes the model, uninitialised.
        inputs: the model's positional arguments, from a batch.
        loss: scalar mean loss of a micro batch, from the model's output and the batch.
    """

    build: Callable[[Group], LayerStack]
    inputs: Callable[[Any], tuple[Tensor | None, ...]]
    loss: Callable[[Tensor, Any, Group], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: mean loss over micro batches and data-parallel ranks, a scalar on the device.
        grad_norm: global 2-norm of the gradients before clipping; infinite when they overflowed.
        skipped: whether the gradients were not finite, so that no weight changed.
        loss_scale: the scale that the loss had.
    """

    loss: Tensor
    grad_norm: float
    skipped: bool
    loss_scale: float


class TrainEngine:
    """A model inside DeepSpeed's engine, at any ZeRO stage.

    Args:
        config: the run.
        content: the completed DeepSpeed JSON.
        program: the model and its loss.
        groups: the layout's process groups.
        device: where the model runs.
    """

    def __init__(
        self,
        config: RunConfig,
        content: Json,
        program: ModelProgram,
        groups: ProcessGroups,
        device: torch.device,
    ) -> None:
        self.config, self.program, self.groups, self.device = config, program, groups, device
        self.stage = config.engine.zero_stage
        settings = for_engine(content, config, device.type == "cpu")
        with self._partitioned_construction(settings):
            self.model = program.build(groups.tensor)
        self.names = {param: name for name, param in self.model.canonical_parameters()}
        for param, name in self.names.items():
            self._initialise(name, param)
        if config.training.torch_compile:
            compile_blocks(self.model, device)
        self.optimizer = build_optimizer(self.names, config.optimizer)
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=settings, mpu=Mpu(groups)
        )
        if self.stage > 0:
            self._grow_scale = defer_scale_growth(self.engine.optimizer)

    def _partitioned_construction(self, settings: Json) -> contextlib.AbstractContextManager:
        """At stage 3 each parameter is partitioned as soon as it exists."""
        return deepspeed.zero.Init(
            data_parallel_group=self.groups.data.handle,
            config_dict_or_path=settings,
            enabled=self.stage == 3,
            mpu=Mpu(self.groups),
        )

    def _initialise(self, name: str, param: nn.Parameter) -> None:
        seed, tensor = self.config.training.seed, self.groups.tensor
        if self.stage < 3:
            initialise(name, param, seed, tensor.rank, tensor.size)
            return
        shard = shard_of(param)
        values = nn.Parameter(torch.empty(shard.local_shape(tensor.size)))
        values.shard, values.init = shard, init_of(param)  # type: ignore[attr-defined]
        initialise(name, values, seed, tensor.rank, tensor.size)
        set_partition(param, self.groups.data, values.data)

    @property
    def data_rank(self) -> int:
        """This process's data-parallel rank."""
        return self.groups.data.rank

    def train_step(
        self,
        batches: Iterator[Batch],
        micro_batches: int,
        consumed_samples: int,
        lr: float,
        weight_decay: float,
    ) -> StepResult:
        """Takes ``micro_batches`` batches through the model and updates the weights once.

        Args:
            batches: this rank's micro batches; as many as are needed are taken.
            micro_batches: number of micro batches of this step.
            consumed_samples: samples of all steps before this one.
            lr: learning rate of this step.
            weight_decay: weight decay of this step.
        """
        engine = self.engine
        engine.train()
        set_rates(self.optimizer, lr, weight_decay)
        samples = self.config.training.micro_batch_size or 1
        per_round = samples * self.groups.data.size
        engine.set_train_batch_size(per_round * micro_batches)
        total = torch.zeros((), device=self.device)
        for number in range(micro_batches):
            first_sample = consumed_samples + number * per_round + self.data_rank * samples
            seed_micro_batch(self.config.training.seed, first_sample)
            engine.set_gradient_accumulation_boundary(number == micro_batches - 1)
            loss = self._forward(next(batches))
            engine.backward(loss)
            total += loss.detach()
            if number < micro_batches - 1:
                engine.step()
        scale_before = self._loss_scale()
        norm, skipped = self._update()
        return StepResult(
            loss=self._data_mean(total / micro_batches),
            grad_norm=norm,
            skipped=skipped,
            loss_scale=scale_before,
        )

    def close(self) -> None:
        """Takes DeepSpeed's hooks off the parameters; they would keep the engine alive for ever."""
        self.engine.destroy()

    def _forward(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device, non_blocking=True)
        logits = self.engine(*self.program.inputs(batch))
        return self.program.loss(logits, batch, self.groups.tensor)

    def _update(self) -> tuple[float, bool]:
        """Clips and applies the gradients; returns their norm and whether the step was skipped."""
        if self.stage == 0:
            return self._update_unpartitioned()
        self.engine.step()
        if self.optimizer_wrapper.overflow:
            return float("inf"), True
        self._grow_scale()
        return float(self.engine.get_global_grad_norm()), False

    def _update_unpartitioned(self) -> tuple[float, bool]:
        params = list(self.names)
        norm = gradient_norm(params, self.groups.tensor)
        finite = bool(torch.isfinite(norm))
        if not finite:
            for param in params:
                param.grad = None
        elif self.config.optimizer.clip_grad > 0:
            clip_gradients(params, norm, self.config.optimizer.clip_grad)
        self.engine.step()
        return (float(norm), False) if finite else (float("inf"), True)

    @property
    def optimizer_wrapper(self) -> Any:
        """DeepSpeed's optimizer around :attr:`optimizer` (the same object at stage 0)."""
        return self.engine.optimizer

    def _loss_scale(self) -> float:
        return float(getattr(self.optimizer_wrapper, "loss_scale", 1.0))

    def _data_mean(self, value: Tensor) -> Tensor:
        if self.groups.data.size > 1:
            dist.all_reduce(value, group=self.groups.data.handle)
            value = value / self.groups.data.size
        return value

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over all micro batches of all data-parallel ranks."""
        self.engine.eval()
        total, count = torch.zeros((), device=self.device), 0
        for batch in batches:
            total += self._forward(batch)
            count += 1
        return float(self._data_mean(total / count))


def partition_range(param: nn.Parameter, data: Group) -> tuple[int, int]:
    """Where this rank's partition lies in a flattened parameter at ZeRO stage 3: [start, end)."""
    size = param.ds_tensor.ds_numel  # type: ignore[attr-defined]
    start = min(data.rank * size, param.ds_numel)  # type: ignore[attr-defined]
    return start, min(start + size, param.ds_numel)  # type: ignore[attr-defined]


def set_partition(param: nn.Parameter, data: Group, share: Tensor) -> None:
    """Fills this rank's partition of a parameter at ZeRO stage 3 from the whole local share."""
    start, end = partition_range(param, data)
    own = param.ds_tensor.data  # type: ignore[attr-defined]
    own[: end - start].copy_(share.reshape(-1)[start:end])
    # hpZ keeps a second copy from an earlier partitioning; without it DeepSpeed makes a new one.
    param.ds_secondary_tensor = None  # type: ignore[attr-defined]


def defer_scale_growth(wrapper: Any) -> Callable[[], None]:
    """Makes a ZeRO optimizer change its loss scale after a good step instead of within it.

    DeepSpeed 0.19 doubles the dynamic scale before it divides the gradients by it, so that the
    step at which the scale grows would use half the gradients.

    Returns:
        The update that is due after every step that was not skipped.
    """
    update = wrapper._update_scale

    def on_overflow_only(overflow: bool = False) -> None:
        if overflow:
            update(True)

    wrapper._update_scale = on_overflow_only
    return lambda: update(False)


def compile_blocks(model: LayerStack, device: torch.device) -> None:
    """Compiles every block in place; without a compiler they stay eager, said in a line."""
    if device.type == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        # Triton compiles the code that starts its kernels.
        return _stay_eager("C")
    if device.type == "cpu":
        # Seconds to import, and needed here only.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return _stay_eager("C++")
    for block in model.blocks():
        block.compile()


def _stay_eager(language: str) -> None:
    if is_main_process():
        print(f"--torch-compile: no {language} compiler found; the blocks run eagerly", flush=True)
