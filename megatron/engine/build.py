"""The engine that a layout needs."""

from __future__ import annotations

import torch

from megatron.config import RunConfig
from megatron.engine.json_keys import Json
from megatron.engine.pipeline_engine import PipelinedEngine
from megatron.engine.plain_engine import PlainEngine
from megatron.engine.program import ModelSpec
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.mesh import Mesh


def build_engine(
    config: RunConfig,
    content: Json,
    program: ModelSpec,
    mesh: Mesh,
    device: torch.device,
) -> TrainEngine:
    """A model in the engine for its number of pipeline stages; see :class:`TrainEngine`."""
    pipelined = config.parallel.pipeline_model_parallel_size > 1
    engine_class = PipelinedEngine if pipelined else PlainEngine
    return engine_class(config, content, program, mesh, device)
