"""Layers that compute only randomly chosen tokens.

A layer gathers the tokens that it keeps, in their order, and computes only these, with their
positions in the text. It scatters its output back to their places; other tokens pass the layer
unchanged. The choice of tokens depends only on the micro batch's seed and on the layer, so that it
is the same on all tensor-parallel ranks and pipeline stages, in recomputation, and after a resume.

Shapes: B batch, S sequence (with sequence parallelism, a rank's slice), H hidden size, R kept
tokens, L layers that drop tokens.
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
    """Draw the indices of the tokens that each layer keeps in each sample, int64 [L, B, R],
    ascending. They are drawn without replacement, like ``torch.multinomial`` with equal weights,
    but without its GPU synchronization. One tensor serves all layers of a micro batch."""
    random = torch.Generator(device).manual_seed(seed)
    waits = torch.empty(layers * samples, length, device=device).exponential_(generator=random)
    first = waits.reciprocal_().topk(kept).indices.sort().values
    return first.view(layers, samples, kept)


@dataclass
class DroppingStep:
    """Training progress shared by a model's layers: the number of completed steps,
    ``iteration``."""

    dropping: TokenDropping
    iteration: int = 0

    @property
    def reserved(self) -> int:
        return self.dropping.reserved(self.iteration)


@dataclass(frozen=True)
class DroppingLayer:
    """Forward pass of a block that computes only the kept tokens in training, and all tokens
    otherwise. ``number`` is the block's index among the blocks that drop tokens, and ``forward``
    its regular forward pass."""

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
        """Return the masks for the kept tokens. If all kept tokens of a sample are padding, they
        are not masked, because a query must attend to some key. Padding does not affect the
        loss."""
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
    """Return the values of the kept tokens, or their positions if ``values_BS`` is None."""
    if values_BS is None:
        return kept_BR
    return values_BS.expand(len(kept_BR), -1).gather(1, kept_BR)


def put_back(x_BSH: Tensor, y_BRH: Tensor, kept_BR: Tensor, tp: TensorParallel) -> Tensor:
    """Return ``x_BSH`` with the kept tokens' hidden states replaced by ``y_BRH``. With sequence
    parallelism on t ranks, these are the rank's slices [B, S/t, H] and [B, R/t, H]."""
    y_BRH = y_BRH.to(x_BSH.dtype)
    if not tp.split:
        return x_BSH.scatter(1, kept_BR[..., None].expand_as(y_BRH), y_BRH)
    y_BRH, length = tp.enter(y_BRH), x_BSH.shape[1]
    own_BR = kept_BR - tp.group.rank * length
    # Scatter other ranks' tokens to an extra row at the end, which is then dropped.
    own_BR = own_BR.masked_fill((own_BR < 0) | (own_BR >= length), length)
    longer = torch.cat([x_BSH, torch.zeros_like(x_BSH[:, :1])], 1)
    return longer.scatter(1, own_BR[..., None].expand_as(y_BRH), y_BRH)[:, :length]


def with_dropping(spec: ModelSpec, dropping: TokenDropping, model: ModelConfig) -> ModelSpec:
    """Return the specification with layers that drop tokens. Call :func:`begin_step` every step."""
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
    """Set the number of completed steps for the layers that drop tokens."""
    for layer in layers:
        if isinstance(layer.forward, DroppingLayer):
            layer.forward.step.iteration = iteration


class LayerTokens(Callback):
    """Callback that sets the layers' current step, and counts the tokens that they have computed.
    ``state`` is stored in checkpoints under the same names as in DeepSpeed."""

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
