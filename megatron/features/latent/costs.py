"""Numbers of weights, FLOPs and saved activations of latent attention.

A block's GEMMs project a token to latent vectors, these to the heads of queries, keys and values,
and the heads to the output (DeepSeek-V2, arXiv:2405.04434, table 1). Scores are sums over C + R
channels, and weighted sums of values are over V.

Shapes: N heads of a rank, C channels of a head without positions, R rotated channels, D = C + R, V
channels of a value, L latent, Q latent of queries, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.config import ModelConfig
from megatron.features.latent.flags import LatentConfig
from megatron.model.flops import TransformerShape


def layer_weights(model: ModelConfig, tensor: int = 1) -> int:
    """Return the number of weights in a block's attention on one of ``tensor`` tensor-parallel
    ranks, without biases and norms: H Q + Q N D, or H N D, plus H (L + R) + L N (C + V) + N V H."""
    part, hidden = model.part(LatentConfig), model.hidden_size
    heads, width = model.attention.num_attention_heads // tensor, model.attention.kv_channels
    rank = part.q_lora_rank
    queries = hidden * heads * width if rank is None else rank * (hidden + heads * width)
    keys = part.kv_lora_rank * heads * (part.qk_head_dim + part.v_head_dim)
    return queries + hidden * part.latent_width + keys + heads * part.v_head_dim * hidden


def with_latents(shape: TransformerShape, model: ModelConfig) -> TransformerShape:
    """Return the shape with the GEMMs of latent attention instead of direct projections to queries,
    keys and values."""
    part = model.part(LatentConfig)
    if part.idle:
        return shape
    queries = model.attention.num_attention_heads * model.attention.kv_channels
    keys = model.attention.num_query_groups * model.attention.kv_channels
    usual = model.hidden_size * 2 * (queries + keys)
    more = 2.0 * shape.num_layers * (layer_weights(model) - usual)
    matrices, scores = shape.within
    return replace(
        shape,
        value_channels=part.v_head_dim,
        within=(matrices + shape.seq_length * more, scores),
    )


def kept_numbers(model: ModelConfig, tensor: int, recomputes: bool) -> tuple[int, int]:
    """Return the elements per token that a block saves for its backward pass, besides its input:
    those of the heads on one of ``tensor`` ranks, and those of the latent vectors before and after
    their norms. With ``recomputes``, queries, keys and values are recomputed from the latent
    vectors.
    """
    part, width = model.part(LatentConfig), model.attention.kv_channels
    norms = 1 + model.norm.qk_layernorm
    latents = norms * ((part.q_lora_rank or 0) + part.kv_lora_rank) + 2 * part.qk_pos_emb_head_dim
    heads = model.attention.num_attention_heads // tensor
    if recomputes:
        return heads * part.v_head_dim, latents
    if model.attention.attention_backend == "eager":
        return heads * (2 * width + 2 * part.v_head_dim), latents
    # Values are padded, as kernels support a single width. Removing the padding copies outputs.
    padded = max(width, part.v_head_dim)
    output = padded + (part.v_head_dim if padded > part.v_head_dim else 0)
    return heads * (3 * padded + output), latents
