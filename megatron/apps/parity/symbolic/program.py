"""A rank's program: a step of the trainer's own code, without DeepSpeed's engine.

Layers, losses, pipeline passes, norm, optimizer groups and checkpoint slices are those of training.
A minimal engine replaces DeepSpeed's. It divides the loss by the number of micro batches and sums
gradients over the replicas. At ZeRO 1 and 2 it uses the trainer's own bucketed reduction.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.apps.parity.gradients import average_gradients
from megatron.apps.parity.symbolic.reduced import ReducedGradients
from megatron.checkpoint.manifest import IndexEntry, tensor_key
from megatron.checkpoint.slices import Slice
from megatron.config import RunConfig
from megatron.config.features import first_answer, taking_part
from megatron.engine.backend import Backend, PipelineBackend, PlainBackend
from megatron.engine.build import kernel_states
from megatron.engine.pipeline_executor import PipelineExecutor
from megatron.engine.pipeline_module import StageModule
from megatron.engine.saving import own_slices
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.optimizer import (
    build_optimizer,
    factors_of,
    fewer_replicas,
    gradient_norm,
    owned,
)
from megatron.engine.update.shared_gradients import SharedGradients
from megatron.engine.update.zero_optimizer import cut_into_buckets
from megatron.model.layer_list import canonical_parameters
from megatron.model.spec import ModelSpec
from megatron.parallel.mesh import SHARDED, Mesh
from megatron.parallel.shard import Init, Shard, shard_of
from megatron.parallel.tensor_parallel import TensorParallel

CPU = torch.device("cpu")
INIT = Init(std=0.3)
"""Initialisation with a large std, also for biases, so that every gradient is large."""
BUCKETS = 3
"""Approximate number of gradient buckets per rank."""
NO_ZERO = {"zero_optimization": {"stage": 0}}


class _Engine:
    """Substitute for DeepSpeed's engine, with the methods that a plain backend uses."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count, self.last = model, 1, False
        self.optimizer: ReducedGradients | None = None

    def __call__(self, state: Any) -> Any:
        return self.model(state)

    def backward(self, loss: Tensor) -> None:
        (loss / self.count).backward()
        if self.last and self.optimizer is not None:
            self.optimizer.finish()

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self.last = last

    def step(self) -> None:
        pass


class PlainProgram(PlainBackend):
    """A rank's program without pipeline parallelism: all layers."""

    def start(self, optimizer: torch.optim.Optimizer, settings: Any) -> Any:
        self._engine = _Engine(self.model)
        return self._engine


class _Executor(PipelineExecutor):
    """Pipeline passes without DeepSpeed's engine, of which only the module interface remains."""

    def __init__(
        self, module: StageModule, spec: ModelSpec, tensor: TensorParallel, mesh: Mesh
    ) -> None:
        nn.Module.__init__(self)
        self.module, self.device, self.count = module, CPU, 1
        self.optimizer = None
        self.connect(spec, tensor, mesh)

    def __getattr__(self, name: str) -> Any:
        return nn.Module.__getattr__(self, name)

    @property
    def using_bf16_optimizer(self) -> bool:
        return False

    def gradient_accumulation_steps(self) -> int:
        return self.count

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def _backward_prologue(self) -> None:
        pass

    def _backward_epilogue(self) -> None:
        pass

    def _exec_reduce_grads(self) -> None:
        if self.optimizer is not None:
            self.optimizer.finish()


class PipelineProgram(PipelineBackend):
    """A rank's program with pipeline parallelism: the layers of its stages."""

    def start(self, optimizer: torch.optim.Optimizer, settings: Any) -> Any:
        self.executor = _Executor(self.model, self._spec, self.tensor_parallel, self._mesh)
        self._passes = self.executor
        return self.executor


@dataclass
class ParameterShare:
    """A rank's shard of a parameter after a step.

    Attributes:
        options: values of the parameter's optimizer group.
        owned: True if this rank counts the shard in the gradient norm.
    """

    name: str
    shard: Shard
    weight: Tensor
    grad: Tensor | None
    options: tuple[Any, ...]
    owned: bool


@dataclass
class SavedSlice:
    """A slice of a parameter that a rank writes to a checkpoint."""

    name: str
    part: str
    slice: Slice
    values: Tensor


@dataclass
class RankOutcome:
    """Result of a rank's step. The loss is the mean over all samples."""

    rank: int
    coordinates: dict[str, tuple[int, int]]
    loss: float = 0.0
    norm: float = 0.0
    shares: list[ParameterShare] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    slices: list[SavedSlice] = field(default_factory=list)


class Program(TrainEngine):
    """A rank's model and training state, with the gradient reduction of ZeRO ``stage``."""

    def __init__(self, config: RunConfig, spec: ModelSpec, mesh: Mesh, stage: int = 0) -> None:
        pipelined = config.parallel.pipeline_model_parallel_size > 1
        make = PipelineProgram if pipelined else PlainProgram
        backend: Backend = make(config, NO_ZERO, spec, mesh, CPU)
        names = {param: name for name, param in canonical_parameters(backend.model, backend.layers)}
        blocks = [block for sequence in backend.sequences for block in sequence.blocks]
        for feature in taking_part():
            feature.kernels(blocks, config)
        kernels = kernel_states(blocks, names, config, mesh, False)
        super(TrainEngine, self).__init__(config, spec, mesh, CPU, backend, names, kernels)
        plan = first_answer(lambda feature: feature.optimizer(config, self.trained, mesh))
        rules = {} if plan is None else plan.rules
        factors = factors_of(self.trained, config, rules)
        self.apart = fewer_replicas(names, mesh)
        uses, cut = backend.uses(), {}
        if stage in (1, 2):
            most = sum(param.numel() for param in self.trained) // BUCKETS
            cut = {"cut": partial(cut_into_buckets, uses=uses, most=most)}
        self.optimizer = build_optimizer(
            self.trained, config.optimizer, factors, self.apart, None, **cut
        )
        self._samples_per_round = config.training.micro_batch_size * mesh.samples.size
        self.engine: Any = backend.start(self.optimizer, NO_ZERO)
        self.kept = {}
        self._make_reduction = partial(ReducedGradients, uses=uses, mesh=mesh, stage=stage)
        self.reduced: ReducedGradients | None = None
        self._reduces = bool(cut)
        backend.shared = SharedGradients(self.trained, self._gradients, mesh.tensor)

    def _gradients(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        if self.reduced is not None:
            return self.reduced.of(params)
        return [param.grad for param in params if param.grad is not None]

    def prepare(self, micro_batches: int) -> None:
        """Prepare a step with this number of micro batches."""
        if self._reduces and self.reduced is None:  # now that the model has its final dtype
            self.reduced = self._make_reduction(
                [group["params"] for group in self.optimizer.param_groups]
            )
            self.engine.optimizer = self.reduced
        self.model.train()
        self.engine.count = micro_batches
        self.kernels.refresh()

    def step(self, batches: Iterator[Any], count: int, consumed: int = 0) -> RankOutcome:
        """Run the forward and backward passes of ``count`` micro batches, and reduce gradients."""
        self.prepare(count)
        seeds = self._dropout_seeds(consumed, count)
        sums = self.backend.accumulate(self.taught(batches, count), seeds)
        if self.reduced is None:
            average_gradients(self.trained, self.mesh)
        else:
            self.reduced.spread()
        self.kernels.end_step()
        outcome = RankOutcome(self.mesh.world.rank, dict(self.mesh.coordinates))
        outcome.norm = float(gradient_norm(list(self.trained), self.mesh))
        outcome.loss = float(self.spec.total(self.mean_losses(sums, count)))
        options = self._options()
        outcome.shares = [
            ParameterShare(
                name,
                shard_of(param),
                param.detach(),
                param.grad,
                options.get(param, ()),
                owned(param, self.mesh, SHARDED),
            )
            for param, name in self.names.items()
        ]
        outcome.buffers = {name: buffer.values for name, buffer in self.buffers.items()}
        return outcome

    def _options(self) -> dict[nn.Parameter, tuple[Any, ...]]:
        kinds = ("decays", "wd_factor", "lr_factor", "decoupled", "eps")
        return {
            param: tuple(group.get(kind) for kind in kinds)
            for group in self.optimizer.param_groups
            for param in group["params"]
        }

    def saved(self, stage: int) -> list[SavedSlice]:
        """Return the weight slices that this rank writes to a checkpoint at ZeRO ``stage``."""
        view = SimpleNamespace(**vars(self), **_partitioned(self, stage))
        view.stored_states = view.view = view.base = None
        view.trained, view.stage = self.trained, stage
        writer = own_slices(view, Path("."))  # type: ignore[arg-type]
        return [
            SavedSlice(name, part, piece, values.flatten())
            for name, part, piece, values in _written(writer)
        ]


def _partitioned(program: Program, stage: int) -> dict[str, Any]:
    """Return attributes of an engine with parameters partitioned as DeepSpeed does. At stages 1 and
    2, each group is one flat tensor in equal parts, padded to a multiple of twice the number of
    ranks. At stage 3, each parameter is divided into equal parts, of which the last is padded."""
    mesh = program.mesh
    if stage == 0:
        return {"optimizer_wrapper": program.optimizer}
    groups = [group["params"] for group in program.optimizer.param_groups]
    holders = []
    for params in groups:
        ranks = mesh.replicas(shard_of(params[0]))
        if stage < 3:
            flat = torch.cat([param.detach().reshape(-1) for param in params])
            part = -(-flat.numel() // (2 * ranks.size)) * 2
            flat = nn.functional.pad(flat, (0, part * ranks.size - flat.numel()))
            holders.append(flat[ranks.rank * part : (ranks.rank + 1) * part])
            continue
        parts = []
        for param in params:
            ranks = mesh.replicas(shard_of(param))
            size = -(-param.numel() // ranks.size)
            param.ds_numel = param.numel()  # type: ignore[attr-defined]
            param.ds_tensor = SimpleNamespace(ds_numel=size)  # type: ignore[attr-defined]
            flat = nn.functional.pad(
                param.detach().reshape(-1), (0, size * ranks.size - param.numel())
            )
            parts.append(flat[ranks.rank * size : (ranks.rank + 1) * size])
        holders.append(torch.cat(parts))
    wrapper = SimpleNamespace(
        round_robin_bit16_groups=groups,
        single_partition_of_fp32_groups=holders,
        fp32_partitioned_groups_flat=holders,
        grad_position={},
        get_param_id=id,
    )
    for number, params in enumerate(groups if stage == 3 else ()):
        sizes = [param.ds_tensor.ds_numel for param in params]
        for param, offset in zip(params, accumulate(sizes, initial=0), strict=False):
            wrapper.grad_position[id(param)] = number, offset, 0
    return {"optimizer_wrapper": wrapper}


def _written(writer: Any) -> Iterator[tuple[str, str, Slice, Tensor]]:
    """Yield (name, part, slice, values) of the weights that a checkpoint writer has."""
    for name, entries in writer._index.items():
        for entry in map(IndexEntry.from_json, entries):
            key = tensor_key(name, "weight", entry.part)
            yield name, entry.part, entry.slice, writer.tensors[entry.files["weight"]][key]


def make_initial(program: Program) -> None:
    """Convert the model to float64, and initialise all weights depending only on name and seed."""
    from megatron.model.layer_list import initialise

    program.model.double()
    for param, name in program.names.items():
        param.init = INIT  # type: ignore[attr-defined]
        initialise(name, param, program.config.training.seed, program.mesh.coordinates)


Observer = Callable[[str, int, Any], None]
"""Function that is called with a module's canonical name, the index of the call, and its output."""


def observe_modules(program: Program, observer: Observer) -> None:
    """Call ``observer`` with the output of every module in forward passes."""
    from megatron.model.layer_list import canonical_name, canonical_prefixes

    names = canonical_prefixes(program.layers)

    def watch(name: str, module: nn.Module) -> None:
        calls = [0]

        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # not during recomputation
                observer(name, calls[0], output)
                calls[0] += 1

        module.register_forward_hook(hook)

    for registered, module in program.model.named_modules():
        if registered and not registered.startswith("tied_modules"):
            watch(canonical_name(registered, names), module)


def micro_batches(config: RunConfig, mesh: Mesh) -> int:
    """Return the number of micro batches that a rank processes in a step."""
    rounds = config.training.micro_batch_size * mesh.samples.size
    return math.ceil(config.training.global_batch_size / rounds)
