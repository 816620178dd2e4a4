"""Value head, which predicts the expected reward before each token of a completion.

Shapes: B completions of a micro batch, S positions of the input, P positions that predict a target,
H hidden.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron.apps.reinforcement.episodes import EpisodeBatch, at_targets
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.losses import VALUE_LOSS, value_loss
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.engine.loading import load_weights, together
from megatron.engine.train_engine import ModelEngine
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.layers import WholeLinear
from megatron.parallel.loss_head import Targets
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel

VALUE_HEAD = "value_head"
"""Canonical name of the value head's layer."""


def with_value_head(spec: ModelSpec, model: ModelConfig, options: ReinforcementConfig) -> ModelSpec:
    """Return the model specification with a value head inserted before its output head."""

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        *before, head = spec.layers(tp)
        return [*before, LayerSpec(VALUE_HEAD, partial(ValueHead, model, options, tp)), head]

    return replace(
        spec,
        layers=layers,
        added_parts=spec.added_parts | {VALUE_HEAD},
        head_parts=(*spec.head_parts, VALUE_HEAD),
    )


def load_with_value_head(
    engine: ModelEngine, source: Source, fresh: Collection[str]
) -> Source | None:
    """Load a checkpoint without a value head, whose weights keep their initial values, and return
    the source. Return None, without loading, if the checkpoint has a value head. Collective: every
    rank must call it."""
    missing = set(engine.names.values()).difference(fresh, source.names())
    added = {name for name in missing if name.startswith(VALUE_HEAD)}
    if not added:
        return None
    together(engine, lambda: load_weights(engine, source, added.union(fresh)))
    return source


def check_continued(source: Source) -> None:
    """Raise CheckpointError if the checkpoint has no value head, so that ppo cannot resume from the
    checkpoint."""
    if f"{VALUE_HEAD}.weight" not in source.names():
        raise CheckpointError(
            f"{source.folder} was saved without the value head of --rl ppo, and cannot be "
            "continued with it: name it by --pretrained-checkpoint, or give --finetune"
        )


class ValueHead(WholeLinear):
    """Linear layer that predicts one value per target. It does not change the hidden states."""

    only_trained = True

    def __init__(
        self, model: ModelConfig, options: ReinforcementConfig, tp: TensorParallel
    ) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, 1, bias=True, init=init, tp=tp)
        self.options = options

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """Store the values of the targets in ``pooled``, [B, P], or add the value loss if the batch
        has returns. Do nothing without targets."""
        if state.targets is None:
            return state
        x_BPH, targets = state.targets.taken(state.hidden, self.tp)
        values_BP = self.tp.whole_part(super().forward(x_BPH))[..., 0]
        values_BP = values_BP.to(torch.promote_types(values_BP.dtype, torch.float32))
        values_BP = values_BP.masked_fill(targets.mask_BS == 0, 0.0)
        values_BP = targets.gathered(values_BP, self.tp.context)
        batch = state.batch
        if not isinstance(batch, EpisodeBatch) or batch.values_BS is None:
            return state.changed(pooled=values_BP)
        loss = self._loss(values_BP, targets.whole or targets, batch)
        return state.with_loss(VALUE_LOSS, loss.to(values_BP.dtype))

    def _loss(self, values_BP: Tensor, targets: Targets, batch: EpisodeBatch) -> Tensor:
        assert batch.values_BS is not None and batch.old_values_BS is not None
        returns_BP, old_BP = (
            at_targets(each, targets).double() for each in (batch.values_BS, batch.old_values_BS)
        )
        mask_BP = batch.counted(targets)
        wide_BP = values_BP.double()
        return value_loss(self.options, wide_BP, returns_BP, old_BP, mask_BP, batch.share(wide_BP))
