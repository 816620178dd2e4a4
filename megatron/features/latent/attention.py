"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C).

A token has one latent vector and one rotated key, which all heads share. Training expands these to
a key and a value per head. Generation caches them unexpanded. It applies the projection from
latents to keys to the queries instead, and the projection to values after the attention (the
absorbed form).

Shapes: B batch, S sequence inside the sharded layers, s outside them (a slice of it with sequence
parallelism), H hidden size, N heads of this rank, C channels of a head without positions, R rotated
channels, D = C + R, V channels of a value, L latent, Q latent of queries, W = L + R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.config.features import taking_part
from megatron.features.latent.flags import LatentConfig
from megatron.model.attention_backends import attention_backend
from megatron.model.attention_masks import AttentionMasks, AttentionScoring
from megatron.model.layer_list import LayerCache, LayerState
from megatron.model.norm import Norm, norm_of
from megatron.model.rope import RotaryEmbedding, apply_rope, mscale
from megatron.parallel.layers import ColumnParallelLinear, ParallelLinear, RowMap, RowParallelLinear
from megatron.parallel.linear import LinearMap, linear
from megatron.parallel.shard import Cut, Init, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel

Angles = tuple[Tensor, Tensor] | None
"""Cosines and sines of the RoPE rotation; None without rotary positions."""


class WholeParallelLinear(ParallelLinear):
    """Replicated linear layer y = x A^T + b outside the sharded layers. Every rank applies the
    whole weight to its slice of the sequence. Adapters and kernels work as in sharded layers."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__(tp)
        at = tp.coordinates
        self.weight = parameter(Shard((outputs, inputs)), init, at, tp.split)
        self.bias = parameter(Shard((outputs,)), Init(), at, tp.split) if bias else None

    def forward(self, x_BsI: Tensor) -> Tensor:
        """Project [B, s, I] to [B, s, O]."""
        if self.adapters is not None:
            maps = (LinearMap(self.weight, self.bias, 1, self.kernel, self.weight_kept),)
            return self.adapters.outputs(self, x_BsI, maps)[0]
        weight, *biases = self.tp.shared(*self.parameters(recurse=False))
        bias = biases[0] if biases else None
        return linear(x_BsI, weight, bias, self.kernel, self.weight_kept)


class HeadMaps(ColumnParallelLinear):
    """Projections from latent vectors to heads. ``sizes``: channels of a head's keys and values."""

    def __init__(
        self, rank: int, heads: int, sizes: list[int], *, init: Init, tp: TensorParallel
    ) -> None:
        super().__init__(rank, (heads * sum(sizes),), bias=False, init=init, tp=tp)
        self.sizes = sizes

    @property
    def row_matrices(self) -> tuple[Tensor, ...]:
        """Weights by which the absorbed form multiplies, one head of each shape."""
        keys_CL, values_VL = self.weight.detach()[: sum(self.sizes)].split(self.sizes)
        return keys_CL.t(), values_VL

    def forward(
        self, x_BSL: Tensor, use: Callable[[Sequence[RowMap]], Tensor] | None = None
    ) -> Tensor:
        """Project [B, s, L] to [B, S, N (C + V)] or, with ``use``, return the result of calling it
        on the weight. ZeRO 3 gathers the weight only during ``forward``, so this happens here."""
        if use is None:
            return super().forward(x_BSL)
        if self.adapters is None:
            return use([(None, self.weight)])
        return use(self.adapters.changed(self, self.weight))


class LatentCache(LayerCache, Protocol):
    """Latent vectors of sequences, for generation: W numbers of a key, V of a value."""

    def attend_latents(
        self,
        layer: int,
        q_BSNW: Tensor,
        latents_BSW: Tensor,
        width: int,
        scores: AttentionScoring,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """[B, S, N, V] of a block whose heads share one key, the latent vector, of which the first
        V = ``width`` numbers are also the value. Its memory is
        :class:`~megatron.config.sections.Latents`, and ``scores`` have a scale."""
        ...


class LatentInputs(NamedTuple):
    """Inputs of the projections to heads.

    Attributes:
        of_queries: hidden states [B, s, H], or the latent vectors of queries [B, s, Q].
        of_keys: latent vectors of keys and values, [B, s, L].
        rotary_BS1R: channels of the keys that all heads share, already rotated.
        angles: rotation for the queries.
    """

    of_queries: Tensor
    of_keys: Tensor
    rotary_BS1R: Tensor
    angles: Angles


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are projections of latent vectors. With ``recompute``,
    only latent vectors are saved for the backward pass, and heads and attention are recomputed."""

    def __init__(
        self, config: ModelConfig, layer: int, tp: TensorParallel, recompute: bool
    ) -> None:
        super().__init__()
        attention, part = config.attention, config.part(LatentConfig)
        self.layer, self.tp, self.recompute, self.part = layer, tp, recompute, part
        self.width = attention.kv_channels
        self.dropout = attention.attention_dropout
        plain = self.attend = attention_backend(attention.attention_backend, self.dropout)
        for feature in taking_part():
            self.attend = feature.attention(self.attend, config, layer, tp, "causal")
        assert tp.context.size == 1 or self.attend is not plain, "attention needs whole sequences"
        # Fused kernels and context parallelism need values as wide as the keys.
        self.pads = attention.attention_backend != "eager" or tp.context.size > 1
        self.scores = scoring_of(config, layer, tp)
        self.rotation = RotaryEmbedding.of(config, layer)
        hidden, heads, init = config.hidden_size, attention.num_attention_heads, initial(config)
        self.sinks: Tensor | None = None
        self.off_by_one = attention.softmax_type == "off-by-one"
        if attention.softmax_type == "learnable":
            normal = Init(config.init_method_std)
            self.sinks = parameter(Shard((heads,), (Cut(0),)), normal, tp.coordinates)
        # The projections to latent vectors have biases only if attention has them but MLPs do not.
        biased = attention.proj_bias and not config.mlp.bias
        rank, queries = part.q_lora_rank, (heads * self.width,)
        self.q: ColumnParallelLinear | None = None
        if rank is None:
            self.q = ColumnParallelLinear(hidden, queries, bias=False, init=init, tp=tp)
        else:
            self.q_down = WholeParallelLinear(hidden, rank, bias=biased, init=init, tp=tp)
            self.q_norm = latent_norm(config, rank, tp)
            self.q_up = ColumnParallelLinear(rank, queries, bias=False, init=init, tp=tp)
        self.kv_down = WholeParallelLinear(hidden, part.latent_width, bias=biased, init=init, tp=tp)
        self.kv_norm = latent_norm(config, part.kv_lora_rank, tp)
        self.sizes = [part.qk_head_dim, part.v_head_dim]
        self.kv_up = HeadMaps(part.kv_lora_rank, heads, self.sizes, init=init, tp=tp)
        self.proj = RowParallelLinear(
            heads * part.v_head_dim,
            hidden,
            bias=attention.proj_bias,
            init=initial(config, scaled=True),
            tp=tp,
        )

    def forward(self, x_BsH: Tensor, state: LayerState) -> Tensor:
        """Apply attention to ``x_BsH``; [B, s, H]. ``state`` has positions, masks and the KV
        cache."""
        latents = self._latents(x_BsH, state)
        if state.cache is not None:
            absorbed = partial(self._absorbed, latents, cast(LatentCache, state.cache))
            return self.proj(self.kv_up(latents.of_keys, absorbed))
        masks = state.masks or AttentionMasks()
        if self.recompute and torch.is_grad_enabled():
            # Compiled recomputation must build its own masks, not reuse those of the first pass.
            unmade = torch.compiler.is_compiling()
            attend = self._expanded_unmade if unmade else self._expanded
            y_BSX = checkpoint(attend, latents, masks, use_reentrant=False)
        else:
            y_BSX = self._expanded(latents, masks)
        return self.proj(y_BSX)

    def _latents(self, x_BsH: Tensor, state: LayerState) -> LatentInputs:
        of_queries = x_BsH if self.q is not None else self.q_norm(self.q_down(x_BsH))
        down_BsW = self.kv_down(x_BsH)
        sizes = [self.part.kv_lora_rank, self.part.qk_pos_emb_head_dim]
        latent_BsL, rotary_BsR = down_BsW.split(sizes, dim=-1)
        rotary_BS1R = self.tp.enter(rotary_BsR).unsqueeze(2)
        angles: Angles = None
        if self.rotation is not None:
            lengths = None if state.cache is None else state.cache.lengths_BS
            whole = rotary_BS1R.shape[1] * self.tp.context.size
            angles = self.rotation.angles(
                whole, state.position_ids, lengths, x_BsH.device, rotary_BS1R.dtype
            )
        return LatentInputs(
            of_queries, self.kv_norm(latent_BsL), _rotated(rotary_BS1R, angles), angles
        )

    def _queries(self, latents: LatentInputs) -> tuple[Tensor, Tensor]:
        """Return the queries' channels without positions, [B, S, N, C], and the rotated ones, [B,
        S, N, R]."""
        up = self.q_up if self.q is None else self.q
        q_BSND = up(latents.of_queries).unflatten(-1, (-1, self.width))
        sizes = [self.part.qk_head_dim, self.part.qk_pos_emb_head_dim]
        q_BSNC, q_BSNR = q_BSND.split(sizes, dim=-1)
        return q_BSNC, _rotated(q_BSNR, latents.angles)

    def _expanded_unmade(self, latents: LatentInputs, masks: AttentionMasks) -> Tensor:
        return self._expanded(latents, masks.unmade())

    def _expanded(self, latents: LatentInputs, masks: AttentionMasks) -> Tensor:
        """Return the attention output of all heads, [B, S, N V], from expanded keys and values."""
        part = self.part
        kv_BSNE = self.kv_up(latents.of_keys).unflatten(-1, (-1, sum(self.sizes)))
        k_BSNC, v_BSNV = kv_BSNE.split(self.sizes, dim=-1)
        rotary_BSNR = latents.rotary_BS1R.expand(-1, -1, k_BSNC.shape[2], -1)
        q_BSND = torch.cat(self._queries(latents), -1)
        k_BSND = torch.cat([k_BSNC, rotary_BSNR], -1)
        q, k, v = (self._padded(x).transpose(1, 2) for x in (q_BSND, k_BSND, v_BSNV))
        dropout = self.dropout if self.training else 0.0
        arguments = q, k, v, self.scores, masks, dropout, None, self._sinks(q.shape[1], q)
        if dropout:
            with self.tp.random_inside():
                y_BNSD = self.attend(*arguments)
        else:
            y_BNSD = self.attend(*arguments)
        return y_BNSD.transpose(1, 2)[..., : part.v_head_dim].flatten(2)

    def _padded(self, x: Tensor) -> Tensor:
        """Zero-pad heads to the larger of the key and value widths, for kernels that support a
        single width. The zeros change neither the scores nor the output's first channels."""
        missing = max(self.width, self.part.v_head_dim) - x.shape[-1]
        return F.pad(x, (0, missing)) if self.pads and missing else x

    def _sinks(self, heads: int, like: Tensor) -> Tensor | None:
        return like.new_zeros(heads) if self.off_by_one else self.sinks

    def _absorbed(
        self, latents: LatentInputs, cache: LatentCache, maps: Sequence[RowMap]
    ) -> Tensor:
        """Return the output of all heads, [B, S, N V], from the cache of latent vectors (the
        absorbed form). ``maps`` are the maps from latent vectors to heads, one for each set of rows
        with different adapters."""
        part, sizes = self.part, self.sizes
        split = [(rows, up.unflatten(0, (-1, sum(sizes))).split(sizes, 1)) for rows, up in maps]
        q_BSNC, q_BSNR = self._queries(latents)
        q_BSNL = of_heads(q_BSNC, [(rows, keys_NCL.mT) for rows, (keys_NCL, _) in split])
        y_BSNL = cache.attend_latents(
            self.layer,
            torch.cat([q_BSNL, q_BSNR], -1),
            torch.cat([latents.of_keys, latents.rotary_BS1R.squeeze(2)], -1),
            part.kv_lora_rank,
            self.scores,
            self._sinks(q_BSNL.shape[2], q_BSNL),
        )
        values = [(rows, values_NVL) for rows, (_, values_NVL) in split]
        return of_heads(y_BSNL, values).flatten(2)


def scoring_of(config: ModelConfig, layer: int, tp: TensorParallel) -> AttentionScoring:
    """Return how a block's attention scores are scaled. If --rope-scaling has ``mscale_all_dim``,
    the scores are multiplied by the square of YaRN's factor (`transformers`, ``yarn_apply_mscale``
    in deepseek_v3)."""
    scaling = config.positions.rope_scaling
    scale = 1 / math.sqrt(config.attention.query_pre_attn_scalar)
    if scaling.mscale_all_dim:
        assert scaling.factor is not None
        scale *= mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return replace(AttentionScoring.of(config, layer, tp.group), scale=scale)


def latent_norm(config: ModelConfig, width: int, tp: TensorParallel) -> Norm | nn.Identity:
    """Return the norm for latent vectors, or an identity without --qk-layernorm, as in Megatron."""
    if not config.norm.qk_layernorm:
        return nn.Identity()
    return norm_of(config, width, tp, config.part(LatentConfig).latent_norm_epsilon)


def of_heads(x_BSNI: Tensor, maps: Sequence[RowMap]) -> Tensor:
    """Multiply each head's vectors by the head's own matrix. Return [B, S, N, O]. Each matrix [N,
    O, I] in ``maps`` applies to some batch rows. On a CPU each head is a separate GEMM, so that a
    row's result is bitwise independent of the number of other rows."""
    products: list[Tensor] = []
    for _, weight_NOI in maps:
        weight_NOI = weight_NOI.to(x_BSNI.dtype)
        if x_BSNI.device.type == "cpu":
            each = map(F.linear, x_BSNI.unbind(2), weight_NOI)
            products.append(torch.stack(list(each), 2))
        else:
            products.append(torch.einsum("bsni,noi->bsno", x_BSNI, weight_NOI))
    y_BSNO = products[0]
    for (rows_S1, _), other_BSNO in zip(maps[1:], products[1:], strict=True):
        assert rows_S1 is not None
        y_BSNO = torch.where(rows_S1[..., None], other_BSNO, y_BSNO)
    return y_BSNO


def _rotated(x: Tensor, angles: Angles) -> Tensor:
    return x if angles is None else apply_rope(x, *angles)
