"""The transformer block: attention and MLP with norms and residual connections."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.config.features import taking_part
from megatron.model.attention import Attention
from megatron.model.attention_masks import AttentionKind
from megatron.model.layer_list import LayerState
from megatron.model.mlp import MLP
from megatron.model.norm import build_norm
from megatron.parallel.layers import Dropout
from megatron.parallel.tensor_parallel import TensorParallel


class Block(nn.Module):
    """Pre-norm attention and MLP, added to the residual stream one after the other, or, with
    ``parallel_residual``, both computed from the same stream. With
    ``apply_residual_connection_post_layernorm`` each is added to its norm's output, which makes a
    stack of blocks between two norms a post-norm transformer. ``attention`` builds the attention
    module from the other arguments.

    With ``hands_on``, set by :meth:`LayerSequence.hand_on`, the MLP's output is not added here but
    returned as ``pending`` in the state, and the next block adds it."""

    hands_on = False

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        recompute_attention: bool,
        kind: AttentionKind = "causal",
        attention: Callable[..., nn.Module] = Attention,
    ) -> None:
        super().__init__()
        self.layer = layer
        post = nn.Identity if not config.norm.post_norm else lambda: build_norm(config, tp)
        pre = nn.Identity if not config.norm.pre_norm else lambda: build_norm(config, tp)
        # In other blocks the last sum is fused with a norm or with another sum of the block.
        self.may_hand_on = not (config.norm.post_norm or config.parallel_residual)
        self.may_hand_on &= config.has("mlp", layer)
        self.parallel = config.parallel_residual
        self.adds_to_normed = config.norm.apply_residual_connection_post_layernorm
        self.attention: nn.Module | None = None
        if config.has("attention", layer):
            mixers = (f.mixer(config, layer, tp, recompute_attention) for f in taking_part())
            mixer = next((m for m in mixers if m is not None), None) if kind == "causal" else None
            self.attention_norm = pre()
            self.attention = mixer or attention(config, layer, tp, recompute_attention, kind)
            self.attention_post_norm = post()
        self.mlp: nn.Module | None = None
        self.mlp_is_plain = True
        if config.has("mlp", layer):
            self.mlp_norm = None if config.shared_parallel_norm else pre()
            others = (feature.mlp(config, layer, tp) for feature in taking_part())
            other = next((mlp for mlp in others if mlp is not None), None)
            self.mlp_is_plain = other is None
            self.mlp = MLP(config, tp) if other is None else other
            self.mlp_post_norm = post()
        self.dropout = Dropout(config.hidden_dropout, tp)
        self.multiplier = config.residual_multiplier

    def forward(self, state: LayerState) -> LayerState:
        x = y = normed = state.total
        if self.attention is not None:
            normed = self.attention_norm(x)
            attended = self._added(self.attention_post_norm(self.attention(normed, state)))
            y = (normed if self.adds_to_normed else x) + attended
        y, state = self.between(y, state)
        if self.mlp is None:
            return state.with_hidden(y)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x if self.parallel else y)
        fed, state = (self.mlp(normed), state) if self.mlp_is_plain else self.mlp(normed, state)
        last = self._added(self.mlp_post_norm(fed))
        if self.adds_to_normed:
            y = normed
        if self.hands_on:
            return state.changed(hidden=y, pending=last)
        return state.with_hidden(y + last)

    def between(self, y_BSH: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Return the residual stream and the state before the MLP. Subclasses override this method
        to compute something between attention and MLP."""
        return y_BSH, state

    def _added(self, output: Tensor) -> Tensor:
        """Return the term that a sublayer's output adds to the residual stream."""
        output = self.dropout(output)
        return output if self.multiplier is None else output * self.multiplier
