"""Builds a run's training engine: layers, kernels, compiled blocks, optimizer, DeepSpeed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.config import ConfigError, RunConfig
from megatron.config.engine import MOST_BUCKET, bucket_size
from megatron.config.features import first_answer, taking_part
from megatron.engine.backend import Backend, PipelineBackend, PlainBackend, runs_graphs
from megatron.engine.compilation import compile_blocks, to_compile
from megatron.engine.deepspeed_file import check_settings
from megatron.engine.deepspeed_json import Json, for_engine, offloads, stage_of
from megatron.engine.deepspeed_patches import (
    allow_fp16,
    fewer_replicas_apart,
    fp16_optimizer,
    guard,
    leave_norm_to_us,
    measure_fewer_replicas,
    outlast_monitor,
    own_reduction,
    reduces,
    refuse_what_is_wrong,
    take_out,
)
from megatron.engine.state import gradients_of
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.async_step import can_defer
from megatron.engine.update.optimizer import (
    build_optimizer,
    check_groups,
    factors_of,
    fewer_replicas,
)
from megatron.engine.update.shared_gradients import SharedGradients
from megatron.engine.update.zero_optimizer import ReducingOptimizer, cut_into_buckets, sum_in_place
from megatron.model.layer_list import canonical_parameters
from megatron.model.spec import ModelSpec
from megatron.parallel.linear import KernelStates, SeveralStates
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of
from megatron.util.processes import is_main_process

logger = logging.getLogger(__name__)


def build_engine(
    config: RunConfig,
    content: Json,
    spec: ModelSpec,
    mesh: Mesh,
    device: torch.device,
) -> TrainEngine:
    """Build a run's training engine with initial weights. ``content`` is the completed DeepSpeed
    JSON. Raises ConfigError if the device or DeepSpeed does not support the configuration."""
    check_device(config, device)  # fail before minutes of initialisation
    settings = for_engine(content, config, device.type == "cpu")
    if config.engine.deepspeed_config:
        check_settings(settings, config.engine.deepspeed_config)
    if config.precision.fp16 and device.type == "cpu":
        allow_fp16()
    backend = backend_class(config)(config, settings, spec, mesh, device)
    names = {param: name for name, param in canonical_parameters(backend.model, backend.layers)}
    for param, name in names.items():
        backend.initialise(name, param)
    blocks = [block for sequence in backend.sequences for block in sequence.blocks]
    if device.type == "cuda":
        lines = (f.attention_line(config, device, spec.attention) for f in taking_part())
        for line in filter(None, lines):
            _say(line)
    for feature in taking_part():
        feature.kernels(blocks, config)
    if to_compile(config, device):
        compile_blocks(backend.sequences, config.fast_paths, device)
    trained = {param: name for param, name in names.items() if param.requires_grad}
    _require_trained(list(trained), mesh)
    update = _update_of(config, settings, mesh, backend, trained, fewer_replicas(names, mesh))
    engine = _started(config, settings, mesh, device, backend, trained, update)
    stored = first_answer(lambda f: f.stored_states(config, trained, mesh, device))
    if stored is not None:
        stored.take_main_weights(engine.optimizer, update.optimizer)
    kernels = kernel_states(blocks, names, config, mesh, backend.stage == 3)
    built = TrainEngine(
        config,
        spec,
        mesh,
        device,
        backend,
        names,
        update.optimizer,
        engine,
        update.asynchronous,
        kernels,
        stored,
    )
    built.content = content
    # DeepSpeed measures offloaded gradients during backward passes, so each pass must sum them.
    if not any(offloads(settings, key) for key in ("offload_optimizer", "offload_param")):
        kept = partial(gradients_of, built)
        backend.shared = SharedGradients(built.trained, kept, mesh.tensor)
    for feature in taking_part():
        feature.built(built)
    return built


class _Update(NamedTuple):
    """Optimizer of a run, and how DeepSpeed's engine uses it.

    Attributes:
        make: creates the optimizer's ZeRO wrapper if this project reduces gradients, else None.
        asynchronous: whether an optimizer step runs without waiting for the device.
        apart: parameters with fewer replicas than the others.
    """

    optimizer: torch.optim.Optimizer
    make: Callable[..., Any] | None
    asynchronous: bool
    apart: Sequence[nn.Parameter]


def _update_of(
    config: RunConfig,
    settings: Json,
    mesh: Mesh,
    backend: Backend,
    trained: Mapping[nn.Parameter, str],
    apart: Sequence[nn.Parameter],
) -> _Update:
    """Build the optimizer, and edit DeepSpeed's ``settings`` in place to suit it."""
    plan = first_answer(lambda feature: feature.optimizer(config, trained, mesh))
    factors = factors_of(trained, config, {} if plan is None else plan.rules)
    for feature in taking_part():
        for line in feature.group_lines(config, trained, factors, mesh):
            _say(line)
    most = _adapt_settings(settings, config, trained, mesh)
    asynchronous = plan is None and can_defer(config, settings)
    uses, make, cut = backend.uses(), None, {}
    if reduces(settings, config):
        make = partial(
            ReducingOptimizer,
            uses=uses,
            mesh=mesh,
            stage=backend.stage,
            sums_in_fp32=config.precision.accumulate_allreduce_grads_in_fp32,
            overlapped=config.engine.overlap_grad_reduce,
        )
        settings.pop("data_types", None)
        # Stored states may have a scale for each block of elements, which copies must share.
        copies_apart = config.precision.states is not None
        cut = {"cut": partial(cut_into_buckets, uses=uses, most=most, copies_apart=copies_apart)}
    optimizer = build_optimizer(trained, config.optimizer, factors, apart, plan, **cut)
    if asynchronous:
        leave_norm_to_us(settings)
    if (factors or mesh.group("expert").size > 1) and backend.stage == 1 and make is None:
        check_groups(optimizer, mesh)
    return _Update(optimizer, make, asynchronous, apart)


def _started(
    config: RunConfig,
    settings: Json,
    mesh: Mesh,
    device: torch.device,
    backend: Backend,
    trained: Mapping[nn.Parameter, str],
    update: _Update,
) -> Any:
    """Start DeepSpeed's engine, and replace its parts that this project implements itself."""
    with (
        own_reduction(update.make),
        fp16_optimizer(config, mesh),
        fewer_replicas_apart(update.apart, mesh, backend.stage),
    ):
        engine = backend.start(update.optimizer, settings)
    outlast_monitor(engine)
    if not runs_graphs(config, device):
        sum_in_place(trained, engine.optimizer)
    take_out(engine, mesh.dense.size)
    guard(engine.optimizer)
    measure_fewer_replicas(engine.optimizer, update.apart, mesh)
    return engine


def check_device(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if the device does not support what the flags request."""
    for feature in taking_part():
        feature.check_device(config, device)


def kernel_states(
    blocks: Sequence[nn.Module],
    names: Mapping[nn.Parameter, str],
    config: RunConfig,
    mesh: Mesh,
    partitioned: bool,
) -> KernelStates:
    """Return the state that the blocks' layers and kernels keep between steps."""
    states = (
        feature.kernel_states(blocks, names, config, mesh, partitioned) for feature in taking_part()
    )
    members = [member for member in states if member is not None]
    return members[0] if len(members) == 1 else SeveralStates(members)


def backend_class(config: RunConfig) -> type[Backend]:
    """Return the backend class for the layout of a run."""
    pipelined = config.parallel.pipeline_model_parallel_size > 1
    return PipelineBackend if pipelined else PlainBackend


def _adapt_settings(
    settings: Json, config: RunConfig, params: Iterable[nn.Parameter], mesh: Mesh
) -> int:
    """Edit ``settings`` in place: turn off what this run does not need in DeepSpeed, and set the
    bucket size. Return the maximum number of elements per collective."""
    in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
    refuse_what_is_wrong(stage_of(settings), in_fp32 and not reduces(settings, config))
    count = sum(math.prod(shard_of(param).local_shape(mesh.coordinates)) for param in params)
    zero = settings.setdefault("zero_optimization", {})
    # DeepSpeed allocates whole gradient buckets in every step, of 5e8 elements by default.
    zero.setdefault("reduce_bucket_size", bucket_size(count))
    # DeepSpeed's timer synchronizes around every micro batch; the trainer has its own clock.
    settings.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    return min(zero["reduce_bucket_size"], zero.get("allgather_bucket_size", MOST_BUCKET))


def _require_trained(trained: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Raise ConfigError if a pipeline stage trains no parameter, since an optimizer needs one."""
    if not trained:
        raise ConfigError(
            f"pipeline rank {mesh.pipeline.rank} of {mesh.pipeline.size} has no parameter that is "
            "trained: give it a block with adapters (--lora-targets, --pipeline-partition), or use "
            "a smaller --pipeline-model-parallel-size"
        )


def _say(line: str) -> None:
    if is_main_process():
        print(line, flush=True)
