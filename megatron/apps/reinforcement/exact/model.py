"""Models whose forward pass in training is bitwise equal to generation, and the reasons why a run
cannot have this."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron.apps.generation.execution.row_rule import RowRule, is_packed
from megatron.apps.generation.execution.runner import has_states
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.reinforcement.exact.cache import EpisodeCache
from megatron.apps.reinforcement.exact.head import DrawnTargets
from megatron.apps.reinforcement.exact.layout import PagedEpisodes
from megatron.config import RunConfig
from megatron.engine.train_engine import ModelEngine
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec

DTYPES = torch.float32, torch.bfloat16
MOST_RANKS = 2
"""Maximum number of tensor-parallel ranks. Beyond it, results depend on the order of summation."""


def with_pages(spec: ModelSpec) -> ModelSpec:
    """Return the model specification, extended to train on :class:`PagedEpisodes`."""
    return dataclasses.replace(spec, begin=_Begin(spec.begin))


@dataclasses.dataclass(frozen=True)
class _Begin:
    """Function that creates the model's initial state for a micro batch."""

    plain: Callable[[Any], LayerState]

    def __call__(self, batch: Any) -> LayerState:
        if not isinstance(batch, PagedEpisodes):
            return self.plain(batch)
        state = self.plain(batch.rows)
        assert state.targets is not None
        tokens_1T = batch.tokens_1T
        cache = EpisodeCache(batch.layout, tokens_1T.shape[1], tokens_1T.device)
        return state.changed(
            hidden=tokens_1T,
            position_ids=cache.position_ids_BS,
            masks=None,
            cache=cache,
            targets=DrawnTargets.of(state.targets, batch.targets_BP),
        )


def inexact_layout(config: RunConfig, spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Return why the probabilities of training and generation differ in their last bits, worded to
    follow "since", or None if the configuration gives no such reason."""
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_model_parallel_size
    scaling = model.positions.rope_scaling
    reasons = {
        "recurrent blocks compute a text in pieces": has_states(model),
        f"--context-parallel-size {parallel.context_parallel_size} divides texts over ranks": (
            parallel.context_parallel_size > 1
        ),
        f"--tensor-model-parallel-size {tensor} adds up in an order that depends on the size of "
        "what is added": tensor > MOST_RANKS,
        "--sequence-parallel divides the row of texts over ranks": (
            parallel.sequence_parallel and tensor > 1
        ),
        f"weights are {str(dtype).removeprefix('torch.')}": dtype not in DTYPES,
        "dropout is for training only": bool(
            model.hidden_dropout or model.attention.attention_dropout
        ),
        "routers draw numbers in training": spec.draws,
        "long sequences rotate otherwise (longrope)": scaling.rope_type == "longrope",
        "blocks are compiled for training": config.fast_paths.torch_compile == "on",
        "products are in 8 bits": config.fast_paths.in_8_bits,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def inexact_device(engine: ModelEngine, rule: RowRule) -> str | None:
    """Return why an engine's device makes the probabilities differ, or None if it does not. All
    ranks return the same."""
    if engine.device.type != "cpu":
        return f"products on {engine.device.type} depend on what is computed together"
    if rule.most is not None:
        return "products of this processor depend on their number of rows"
    return None


def row_rule(engine: ModelEngine) -> RowRule:
    """Return the rule for padding the rows of the model's forward passes in training. Collective:
    every rank must call it."""
    stages = StagedLayers.of(engine)
    return RowRule.of(stages.weights, is_packed).agreed(engine.mesh.model)
