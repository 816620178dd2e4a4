"""Layers that compute a random part of the tokens.

A layer gathers the tokens that it keeps, in their order, computes them alone, with the positions
that they have in the text, and puts its output in their places; the others pass it unchanged. Which
tokens are kept is a function of the micro batch's seed and of the layer, so that it is the same on
all tensor-parallel ranks and pipeline stages, in a recomputation, and after a resume.

Shapes: B batch, S sequence (a rank's slice of it where the region is split), H hidden, R tokens
that are kept, L layers that drop tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.features.random_ltd.flags import TokenDropping
from megatron.features.random_ltd.lengths import layer_tokens
from megatron.model.attention_flex import block_masks
from megatron.model.attention_masks import AttentionMasks, tensor_cache
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.random import derive_seed
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.training.trainer import Callback, Step, Trainer


@tensor_cache(1)
def kept_tokens(
    seed: int, layers: int, samples: int, length: int, kept: int, device: torch.device
) -> Tensor:
    """The tokens that each layer keeps of each sample, int64 [L, B, R], ascending: drawn without
    replacement as ``torch.multinomial`` draws them with equal weights, which would synchronize with
    a GPU. One tensor for all layers of a micro batch."""
    random = torch.Generator(device).manual_seed(seed)
    waits = torch.empty(layers * samples, length, device=device).exponential_(generator=random)
    first = waits.reciprocal_().topk(kept).indices.sort().values
    return first.view(layers, samples, kept)


@dataclass
class DroppingStep:
    """The step that the layers of a model are in: ``iteration`` steps were before it."""

    dropping: TokenDropping
    iteration: int = 0

    @property
    def reserved(self) -> int:
        return self.dropping.reserved(self.iteration)


@dataclass(frozen=True)
class DroppingLayer:
    """Runs a block on the kept tokens in training steps, and on all tokens outside of training;
    ``number``: its place among such blocks; ``forward``: its ordinary pass."""

    number: int
    step: DroppingStep
    model: ModelConfig
    tp: TensorParallel
    forward: Callable[[nn.Module, LayerState], LayerState] | None = field(default=None)

    def __call__(self, block: nn.Module, state: LayerState) -> LayerState:
        run = block if self.forward is None else functools.partial(self.forward, block)
        length, kept = state.hidden.shape[1] * self.tp.slices, self.step.reserved
        if state.dropout_seed is None or not block.training or kept >= length:
            return run(state)
        seed = derive_seed(state.dropout_seed, "random-ltd")
        layers, samples = len(self.step.dropping.layers), state.hidden.shape[0]
        drawn_LBR = kept_tokens(seed, layers, samples, length, kept, state.hidden.device)
        kept_BR, x_BSH = drawn_LBR[self.number], state.total
        after = run(
            state.changed(
                hidden=self.tp.take(x_BSH, kept_BR),
                pending=None,
                position_ids=_at(state.position_ids, kept_BR),
                masks=self._masks(state.masks, kept_BR),
            )
        )
        put_BSH = put_back(x_BSH, after.total, kept_BR, self.tp)
        return state.changed(hidden=put_BSH, pending=None, losses=after.losses)

    def _masks(self, masks: AttentionMasks | None, kept_BR: Tensor) -> AttentionMasks | None:
        """Return the masks of the kept tokens. A sample without any kept text attends to its
        padding: a query must see a key, and padding reaches no loss."""
        if masks is None:
            return None
        ids_BR = masks.document_ids
        ids_BR = None if ids_BR is None else _at(ids_BR, kept_BR)
        padding_BR = None
        if masks.tokens is not None:
            text_BR = _at(masks.tokens[:, 0, 0], kept_BR)
            padding_BR = ~(text_BR | ~text_BR.any(1, keepdim=True))
        blocks = block_masks(self.model, kept_BR, ids_BR, masks.causal) if masks.blocks else None
        return AttentionMasks(ids_BR, padding_BR, blocks, masks.causal)


def _at(values_BS: Tensor | None, kept_BR: Tensor) -> Tensor:
    """Return the kept tokens' values among all tokens' values; by default their positions."""
    if values_BS is None:
        return kept_BR
    return values_BS.expand(len(kept_BR), -1).gather(1, kept_BR)


def put_back(x_BSH: Tensor, y_BRH: Tensor, kept_BR: Tensor, tp: TensorParallel) -> Tensor:
    """``x_BSH`` with other values of the kept tokens; of a split region this rank's slices [B, S/t,
    H] and [B, R/t, H] on each of t ranks."""
    y_BRH = y_BRH.to(x_BSH.dtype)
    if not tp.split:
        return x_BSH.scatter(1, kept_BR[..., None].expand_as(y_BRH), y_BRH)
    y_BRH, length = tp.enter(y_BRH), x_BSH.shape[1]
    own_BR = kept_BR - tp.group.rank * length
    # Those of other ranks go to a row after the last.
    own_BR = own_BR.masked_fill((own_BR < 0) | (own_BR >= length), length)
    longer = torch.cat([x_BSH, torch.zeros_like(x_BSH[:, :1])], 1)
    return longer.scatter(1, own_BR[..., None].expand_as(y_BRH), y_BRH)[:, :length]


def with_dropping(spec: ModelSpec, dropping: TokenDropping, model: ModelConfig) -> ModelSpec:
    """Return the model whose layers drop tokens in training; :func:`begin_step` says which step it
    is."""
    places = {f"layers.{layer}": number for number, layer in enumerate(dropping.layers)}
    step = DroppingStep(dropping)

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        return [
            replace(each, forward=DroppingLayer(places[each.name], step, model, tp, each.forward))
            if each.name in places
            else each
            for each in spec.layers(tp)
        ]

    return replace(spec, layers=layers, draws=True)


def begin_step(layers: Sequence[LayerSpec], iteration: int) -> None:
    """Set the number of completed steps in the layers of a model that drop tokens."""
    for layer in layers:
        if isinstance(layer.forward, DroppingLayer):
            layer.forward.step.iteration = iteration


class LayerTokens(Callback):
    """Announces each step to the layers, and counts the tokens that they have computed. ``state``
    is DeepSpeed's checkpoint state, under the same names."""

    def __init__(
        self,
        dropping: TokenDropping,
        samples: Callable[[int], int],
        layers: Sequence[LayerSpec],
    ) -> None:
        self._dropping, self._samples, self._layers = dropping, samples, layers
        self.state: dict[str, Any] = {}
        self._count(0)

    def before_step(self, trainer: Trainer) -> None:
        begin_step(self._layers, trainer.iteration)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self._count(step.iteration)

    def went_back(self, trainer: Trainer) -> None:
        self._count(trainer.iteration)

    def _count(self, steps: int) -> None:
        dropping = self._dropping
        self.state |= {
            "consumed_layer_tokens": layer_tokens(dropping, steps, self._samples),
            "current_steps": steps - 1,
            "current_value": dropping.reserved(steps - 1) if steps else dropping.lowest,
            "min_value": dropping.lowest,
            "max_value": dropping.highest,
        }
