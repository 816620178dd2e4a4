"""Puts the engine together that a layout needs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.engine.backend import Backend
from megatron.engine.compile import compile_blocks
from megatron.engine.deepspeed_json import for_engine
from megatron.engine.deepspeed_patches import (
    allow_fp16,
    guard,
    keep_gradients_in_place,
    leave_norm_to_us,
    take_out,
)
from megatron.engine.float8 import use_float8
from megatron.engine.json_keys import Json
from megatron.engine.optimizer import build_optimizer
from megatron.engine.pipeline_backend import PipelineBackend
from megatron.engine.plain_backend import PlainBackend
from megatron.engine.queued_update import can_queue
from megatron.engine.train_engine import TrainEngine
from megatron.model.layer_list import canonical_parameters
from megatron.model.spec import ModelSpec
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of


def build_engine(
    config: RunConfig,
    content: Json,
    spec: ModelSpec,
    mesh: Mesh,
    device: torch.device,
) -> TrainEngine:
    """A model in training, initialised.

    Args:
        config: the run.
        content: the completed DeepSpeed JSON.
        spec: the model and its losses.
        mesh: the layout's process groups.
        device: where the model runs.
    """
    settings = for_engine(content, config, device.type == "cpu")
    if config.precision.fp16 and device.type == "cpu":
        allow_fp16()
    pipelined = config.parallel.pipeline_model_parallel_size > 1
    make: type[PipelineBackend | PlainBackend] = PipelineBackend if pipelined else PlainBackend
    backend: Backend = make(config, settings, spec, mesh, device)
    names = {param: name for name, param in canonical_parameters(backend.model, backend.layers)}
    for param, name in names.items():
        backend.initialise(name, param)
    blocks = [block for sequence in backend.sequences for block in sequence.blocks]
    use_float8(blocks, config, device)
    if config.fast_paths.torch_compile:
        compile_blocks(blocks, config.fast_paths.torch_compile_mode, device)
    optimizer = build_optimizer(names, config.optimizer)
    queued = _fit_settings(settings, config, names, mesh)
    engine = backend.start(optimizer, settings)
    take_out(engine, mesh.data.size)
    guard(engine.optimizer)
    return TrainEngine(config, spec, mesh, device, backend, names, optimizer, engine, queued)


def _fit_settings(
    settings: Json, config: RunConfig, params: Iterable[nn.Parameter], mesh: Mesh
) -> bool:
    """Has DeepSpeed leave out what this run does not need, or does itself; returns whether the
    update is queued."""
    stage = config.engine.zero_stage
    _fit_buckets(settings, params, mesh)
    # It waits for the device before and after every micro batch; the trainer has a clock.
    settings.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    queued = can_queue(config, settings)
    if queued:
        in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
        leave_norm_to_us(settings, stage, in_fp32)
    if mesh.data.size == 1:
        keep_gradients_in_place(settings, stage)
    return queued


def _fit_buckets(settings: Json, params: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Makes DeepSpeed's gradient buckets no larger than this process's gradients.

    It allocates them whole in every step: 5e8 elements by default, 1 to 2 GB in 16 bits.
    """
    count = sum(math.prod(shard_of(param).local_shape(mesh.coordinates)) for param in params)
    zero = settings.setdefault("zero_optimization", {})
    zero.setdefault("reduce_bucket_size", min(count, 500_000_000))
