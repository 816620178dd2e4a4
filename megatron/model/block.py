"""The transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config import ConfigError, ModelConfig
from megatron.config.features import taking_part
from megatron.model.attention import Attention
from megatron.model.attention_masks import AttentionKind, Folding
from megatron.model.layer_list import LayerState
from megatron.model.mlp import MLP
from megatron.model.norm import build_norm
from megatron.parallel.layers import Dropout
from megatron.parallel.tensor_parallel import TensorParallel


class Block(nn.Module):
    """Pre-norm attention and MLP, added to the residual stream one after the other, or, with
    ``parallel_residual``, both computed from the same stream; with ``cross``, attention to the
    output of an encoder between the two, for which a parallel residual is a ConfigError. With
    ``apply_residual_connection_post_layernorm`` each is added to its norm's output, which makes a
    stack of blocks between two norms a post-norm transformer. ``foldings`` are those of the
    attention to its own sequence and to the encoder's; the other arguments are those of
    :class:`Attention`.

    With ``hands_on`` the sum with the output of the MLP is left to the next block (``pending`` of
    the state), which :meth:`LayerSequence.hand_on` sets."""

    hands_on = False

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        recompute_attention: bool,
        kind: AttentionKind = "causal",
        cross: bool = False,
        foldings: tuple[Folding | None, Folding | None] = (None, None),
    ) -> None:
        super().__init__()
        self.layer = layer
        post = nn.Identity if not config.norm.post_norm else lambda: build_norm(config, tp)
        pre = nn.Identity if not config.norm.pre_norm else lambda: build_norm(config, tp)
        # Elsewhere the last sum is computed with a norm before it, or with the sum before it.
        self.may_hand_on = not (config.norm.post_norm or config.parallel_residual)
        self.may_hand_on &= config.has("mlp", layer)
        self.parallel = config.parallel_residual
        self.adds_to_normed = config.norm.apply_residual_connection_post_layernorm
        self.attention: nn.Module | None = None
        if config.has("attention", layer):
            mixers = (f.mixer(config, layer, tp, recompute_attention) for f in taking_part())
            mixer = next((m for m in mixers if m is not None), None) if kind == "causal" else None
            self.attention_norm = pre()
            self.attention = mixer or Attention(
                config, layer, tp, recompute_attention, kind, foldings[0]
            )
            self.attention_post_norm = post()
        self.cross_attention = None
        if cross:
            if config.parallel_residual:
                raise ConfigError(
                    "--parallel-residual computes attention and MLP from the same input, but a "
                    "decoder's attention to its encoder is between the two: leave the flag out"
                )
            self.cross_attention_norm = pre()
            self.cross_attention = Attention(
                config, layer, tp, recompute_attention, "cross", foldings[1]
            )
            self.cross_attention_post_norm = post()
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
        if self.cross_attention is not None:
            normed = self.cross_attention_norm(y)
            seen, state = self.attend_across(normed, state)
            y = (normed if self.adds_to_normed else y) + seen
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

    def attend_across(self, normed: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Return the addend that attention of normed hidden states to the encoder's output makes,
        and the state after it."""
        assert self.cross_attention is not None
        seen = self.cross_attention_post_norm(self.cross_attention(normed, state))
        return self._added(seen), state

    def _added(self, output: Tensor) -> Tensor:
        """The addend of the residual stream that an output makes."""
        output = self.dropout(output)
        return output if self.multiplier is None else output * self.multiplier
