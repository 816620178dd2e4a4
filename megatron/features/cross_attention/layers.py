"""Attention to an encoder's output, and blocks that apply it between attention and MLP.

Shapes: B batch, S sequence, H hidden, T tokens of the encoder's output; N query heads, K key and
value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from torch import Tensor, nn

from megatron.config import ConfigError, ModelConfig
from megatron.model.attention import Attention
from megatron.model.attention_masks import AttentionKind, AttentionScoring
from megatron.model.block import Block
from megatron.model.layer_list import LayerCache, LayerState
from megatron.model.norm import build_norm
from megatron.parallel.layers import ColumnParallelLinear
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel


class EncodedCache(LayerCache, Protocol):
    """KV cache that also has the keys and values of encoder outputs, for generation."""

    def attend_encoded(
        self,
        layer: int,
        q_BSND: Tensor,
        keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]],
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Attend in block ``layer`` to the encoder's output, and return [B, S, N, D].
        ``keys_and_values`` maps encoder output [B, T, H] to keys and values [B, T, K, D]."""
        ...


class KeyValueLinear(ColumnParallelLinear):
    """Projection to keys and values by one GEMM."""

    matrices = ("k", "v")


class CrossAttention(Attention):
    """Attention whose keys and values are computed from the encoder's output. It has no positions,
    since distances between tokens of two sequences are undefined."""

    def __init__(
        self, config: ModelConfig, layer: int, tp: TensorParallel, recompute: bool
    ) -> None:
        super().__init__(config, layer, tp, recompute, "cross")

    def add_projections(self, config: ModelConfig, heads: int, groups: int) -> None:
        """Add the projections to ``heads`` query heads, and to ``groups`` key and value heads."""
        self.rotation = self.temperature = None
        self.gated = self.norms_last = False
        width, init, tp = config.hidden_size, initial(config), self.tp
        bias, keys = config.attention.qkv_bias, groups * self.head_dim
        self.q = ColumnParallelLinear(width, (heads * self.head_dim,), bias=bias, init=init, tp=tp)
        self.kv = KeyValueLinear(width, (keys, keys), bias=bias, init=init, tp=tp, heads=groups)

    def forward(self, x_BSH: Tensor, state: LayerState) -> Tensor:
        """Map [B, S, H] to [B, S, H], with the encoder output, masks and cache of ``state``."""
        q = self.q(x_BSH).unflatten(-1, (-1, self.head_dim))
        if state.cache is None:
            k, v = self._keys_and_values(state.encoder)
            return self._projected(self.attended(q, k, v, state.changed(bias=None)), None)
        q = self._bounded(q, self.q_norm)
        y_BSND = self.attend_stored(state)(
            self.layer, q, self._bounded_keys_and_values, self.scores, self._sinks(q)
        )
        return self._projected(y_BSND, None)

    def attend_stored(self, state: LayerState) -> Callable[..., Tensor]:
        """Return the KV cache's method for attention to the encoder's output. It has the arguments
        of :meth:`EncodedCache.attend_encoded`."""
        return cast(EncodedCache, state.cache).attend_encoded

    def _keys_and_values(self, encoder_BTH: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = self.kv(encoder_BTH).chunk(2, dim=-1)
        return k.unflatten(-1, (-1, self.head_dim)), v.unflatten(-1, (-1, self.head_dim))

    def _bounded_keys_and_values(self, encoder_BTH: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._keys_and_values(encoder_BTH)
        return self._bounded(k, self.k_norm), self._bounded(v)


class CrossBlock(Block):
    """Block that attends to an encoder's output between attention and MLP. ``across`` builds this
    cross-attention module. Raises ConfigError for a parallel residual."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        recompute_attention: bool,
        kind: AttentionKind = "causal",
        attention: Callable[..., nn.Module] = Attention,
        across: Callable[..., nn.Module] = CrossAttention,
    ) -> None:
        if config.parallel_residual:
            raise ConfigError(
                "--parallel-residual computes attention and MLP from the same input, but a "
                "decoder's attention to its encoder is between the two: leave the flag out"
            )
        super().__init__(config, layer, tp, recompute_attention, kind, attention)
        norm = config.norm
        self.cross_attention_norm = build_norm(config, tp) if norm.pre_norm else nn.Identity()
        self.cross_attention = across(config, layer, tp, recompute_attention)
        self.cross_attention_post_norm = build_norm(config, tp) if norm.post_norm else nn.Identity()
        # Parameters are registered in the order of use, because ZeRO's partitions depend on it.
        for name in ("mlp_norm", "mlp", "mlp_post_norm"):
            if name in self._modules:
                self._modules[name] = self._modules.pop(name)

    def between(self, y_BSH: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Return the residual stream and the state after cross-attention."""
        normed = self.cross_attention_norm(y_BSH)
        seen, state = self.attend_across(normed, state)
        return (normed if self.adds_to_normed else y_BSH) + seen, state

    def attend_across(self, normed: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Return cross-attention's addition to the residual stream, given normalised hidden states,
        and the state after it."""
        seen = self.cross_attention_post_norm(self.cross_attention(normed, state))
        return self._added(seen), state
