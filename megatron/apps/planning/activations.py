"""Activation memory of a rank, in bytes: all that a micro batch keeps for its backward pass.

The estimates follow Korthikanti et al. 2022 (arXiv:2205.05198). With s sequence length, b micro
batch size, h hidden size, a heads and t tensor-parallel ranks, a block of GPT-2's architecture
keeps 16-bit activations of ``s b h (34 + 5 a s / h)`` bytes with dropout (equation 1). Tensor
parallelism replaces the 34 by ``10 + 24 / t`` (equation 2), sequence parallelism by ``34 / t``
(equation 4). This module counts bytes tensor by tensor, which also covers other architectures. Only
the eager attention kernel has the term in s^2: flash kernels keep their output and one number per
query (Dao et al. 2022, arXiv:2205.14135). Savings by compiled blocks and
``--activation-memory-budget`` are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.apps.planning.parameters import (
    block_lengths,
    head_shape,
    local_widths,
    norms_of_block,
)
from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.families import BlockLengths, family_of
from megatron.features.context.costs import (
    attention_widths,
    chunked_on_host,
    heads_of,
    key_bytes_on_the_way,
)
from megatron.features.context.flags import LongContextConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.global_heads.costs import block_kinds
from megatron.features.global_heads.flags import GlobalHeadsConfig
from megatron.features.latent.costs import kept_numbers
from megatron.features.latent.flags import LatentConfig
from megatron.features.recurrent.costs import mean_block
from megatron.model.attention_masks import narrows
from megatron.parallel.cross_entropy import logits_chunk

WHOLE = LongContextConfig()
"""No memory savings for long sequences: nothing is chunked, tiled or offloaded."""

MLP_WIDTHS = {
    "gelu_tanh": 2, "gelu_erf": 2, "relu": 1, "squared_relu": 2, "swiglu": 4, "geglu": 4,
    "geglu_erf": 4, "quick_geglu": 5, "squared_reglu": 5, "xielu": 6,
}  # fmt: skip
"""Number of FFN-sized tensors that an MLP keeps for its backward pass, by activation function.
These are the function's input and output, or only the output for ReLU. Gated MLPs keep gate, up
projection, activated gate and their product; quick_geglu also keeps the sigmoid. xIELU keeps both
branches and factors."""


@dataclass(frozen=True)
class Activations:
    """Bytes that a micro batch keeps for its backward pass on one rank: for a block with given
    sequence lengths, and for the layers before and after the blocks.

    Attributes:
        block: one block, in FP8 if the layout uses it.
        float8: change of ``block`` due to FP8, mostly negative.
        recomputed: one block during its recomputation. 0 without full recomputation.
        masks: attention masks and the input of cross-attention, which a rank's blocks share.
        head: final norm, and the gradients of the output head, which are computed with the loss.
        loss: one chunk of logits, while the loss is computed.
        hidden: tensors sent from one pipeline stage to the next.
        working: temporary memory of a block's backward pass if sequences are split or tiled:
          gradients, one tile of an MLP, key blocks in transit.
        chunks: host memory of a block's chunked attention until its backward pass.
    """

    block: float
    float8: float
    recomputed: float
    embedding: float
    masks: float
    head: float
    loss: float
    hidden: float
    working: float = 0.0
    chunks: float = 0.0


@dataclass(frozen=True)
class _Sizes:
    """Sizes from which the bytes of a micro batch's tensors are computed.

    Attributes:
        element: bytes per element. ``residual`` is for the residual stream, ``source`` for the
          input of a norm.
        statistics: bytes per token that a norm keeps in addition to its input.
        mask: bytes per token of a dropout mask.
        tokens: number of tokens in the block's own sequences. ``others`` is the number that its
          cross-attention reads. Outside GEMMs, ``slices`` ranks share the tokens.
    """

    element: int
    residual: int
    source: int
    statistics: int
    mask: int
    tokens: int
    others: int
    slices: int

    @classmethod
    def of(
        cls, model: ModelConfig, layout: Layout, micro_batch: int, lengths: BlockLengths
    ) -> _Sizes:
        half = layout.precision != "fp32"
        element = 2 if half else 4
        # Autocast keeps the residual stream in float32.
        residual = 4 if layout.autocast or model.fp32_residual_connection else element
        return cls(
            element=element,
            residual=residual,
            # A norm whose weight is stored minus 1 is applied in float32, to a copy of its input.
            source=4 if model.norm.apply_layernorm_1p else residual,
            statistics=4 * model.norm.traits.statistics,
            mask=model.hidden_size if model.hidden_dropout else 0,
            tokens=micro_batch * lengths.own,
            others=micro_batch * lengths.other,
            slices=layout.tensor if layout.sequence else 1,
        )

    @property
    def outside(self) -> float:
        """Tokens per rank outside GEMMs."""
        return self.tokens / self.slices

    def norm(self, hidden: int) -> int:
        """Return the bytes that a norm keeps per token."""
        return self.source * hidden + self.statistics


@lru_cache(maxsize=4096)
def activation_bytes(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    lengths: BlockLengths | None = None,
    saving: LongContextConfig = WHOLE,
) -> Activations:
    """Return the bytes for a block with the given sequence lengths, by default the first block on
    the rank. ``saving`` has the options that save memory for long sequences."""
    lengths = lengths or block_lengths(model, layout)[0]
    sizes, hidden = _Sizes.of(model, layout, micro_batch, lengths), model.hidden_size
    whole = float8 = kernel = 0.0
    for part in lengths.whole:
        keys = [part.keys, *([part.other_keys] if part.other else [])]
        kept_by_kernels = sum(
            _attention_kernel(model, layout, sizes.element, micro_batch, part.own, count)
            for count in keys
        )
        part_sizes = _Sizes.of(model, layout, micro_batch, part)
        kept_by_block, added = _block_bytes(model, layout, part_sizes, kept_by_kernels, saving)
        whole, float8, kernel = whole + kept_by_block, float8 + added, kernel + kept_by_kernels
    vocab = local_widths(model, layout.tensor).vocab
    outputs = micro_batch * min(lengths.own, head_shape(model)[0])
    logits = outputs * sizes.element * vocab
    most, _ = logits_chunk("cuda", sizes.element * vocab, None, compiled=True)
    assert most is not None
    if saving.ds_sequence_parallel_fpdt:
        most = saving.loss_tokens(layout.context)
    chunk = min(logits, most * sizes.element * vocab)
    learned = model.positions.position_embedding_type == "learned_absolute"
    ids = 8 * (sizes.tokens + (lengths.own if learned else 0))
    full = layout.recompute in ("uniform", "block")
    between = sizes.outside * sizes.residual * hidden
    # All blocks read the encoder's sequence. A block with inner blocks computes it from an input of
    # equal size.
    read = sizes.others / sizes.slices * sizes.residual * hidden
    entering = between + read * bool(lengths.inside)
    kept = entering if full else whole - kernel * (layout.recompute == "selective")
    norm = sizes.norm(hidden)
    # Gradients of several chunks are accumulated in float32.
    head = (
        sizes.outside * norm
        + outputs * sizes.element * hidden * (1 + family_of(model.family).head_states)
        + vocab * hidden * (sizes.element if chunk == logits else 4)
    )
    # Each further predicted token has a head, an embedding next to the hidden states, and norms of
    # both.
    merged = sizes.outside * (2 * norm + 4 * sizes.element * hidden)
    return Activations(
        block=kept,
        float8=0.0 if full else float8,
        recomputed=whole if full else 0.0,
        embedding=sizes.outside * (sizes.mask + norm * model.norm.embed_layernorm) + ids,
        masks=_masks(model, layout, sizes.element, micro_batch, lengths) + read,
        head=head + model.blocks_ahead * (head + merged),
        loss=chunk,
        hidden=between + read,
        working=_working(model, layout, sizes, lengths, saving),
        chunks=_chunks(model, layout, sizes, saving),
    )


def _block_bytes(
    model: ModelConfig, layout: Layout, sizes: _Sizes, kernel: float, saving: LongContextConfig
) -> tuple[float, float]:
    """Return the bytes of a block including attention kernels, and how many of them FP8 adds."""
    share, hidden = local_widths(model, layout.tensor), model.hidden_size
    size, tokens, cross = sizes.element, sizes.tokens, sizes.others > 0
    qk_norm = model.norm.qk_layernorm
    # If keys and values are repeated, and queries and keys are rotated, the QKV output is not kept.
    repeated = _all_scores(model) and share.query > share.kv
    rope = model.positions.position_embedding_type == "rope"
    needless = repeated and rope and not qk_norm and layout.recompute is None
    # Rotated queries from a separate projection are not kept either.
    alone = share.alone if rope and not qk_norm and not needless else 0.0
    qkv = share.kv if needless else share.query - alone + share.kv + share.values
    # Normalised or rotated queries and keys are new tensors, while the values keep the whole QKV
    # output alive.
    changed = share.query + share.kv if rope or qk_norm else 0
    mlp = 0.0 if saving.tiles else share.ffn * mlp_widths(model, layout.mlp_act)
    attention: float = qkv + changed + share.query
    if model.part(GlobalHeadsConfig).value_norm:
        # Normalised values, and their float32 inputs if those are separate tensors.
        attention += share.kv * (1 if size == 4 else 1 + 4 / size)
    if layout.context > 1:
        attention = sum(
            kind.share
            * attention_widths(layout, heads_of(kind.model, layout.tensor), changed > 0, qk_norm)
            for kind in block_kinds(model)
        )
    latents, part = 0, model.part(LatentConfig)
    if not part.idle:
        selective = layout.recompute == "selective"
        attention, latents = kept_numbers(model, layout.tensor, selective)
        qk_norm = False
    if chunked_on_host(saving, layout, model.seq_length):
        # The output that the projection reads, and the inputs of the QK norms.
        attention = share.query + (qkv if qk_norm else 0)
    # For gates: the sigmoid, the gated output, and the gate's rows of the QKV output.
    attention += share.gate * (3 - needless - alone / share.query)
    mean = mean_block(model, layout.tensor)
    kept = mean.kept - mean.again * (layout.recompute == "selective")
    wide = 0.0 if layout.recompute == "selective" else 4.0 * mean.wide
    attention, mlp = mean.attention * attention + kept, mean.mlp * mlp
    inputs = norms_of_block(model, cross) * sizes.norm(hidden) * mean.sublayers / 2
    alike = model.parallel_residual and not model.shared_parallel_norm
    if alike and sizes.source == sizes.residual:
        inputs -= sizes.source * hidden  # two norms of the same input share it
    outputs = ((1 if model.shared_parallel_norm else mean.sublayers) + cross) * size * hidden
    masks = (mean.sublayers + cross) * sizes.mask
    whole = sizes.outside * (inputs + outputs + masks) + _angles(model, layout)
    whole += tokens * (size * (attention + mlp) + wide) + sizes.outside * size * latents
    if cross:
        # Queries and attention output, and the keys and values of the encoder's sequence.
        whole += size * 2 * (tokens * share.query + sizes.others * share.kv)
    whole += mean.attention * kernel
    float8 = 0.0
    if layout.float8:
        # Inputs of FP8 layers take one byte per element. It replaces the 16-bit element, or is kept
        # in addition if attention or a ReLU also keeps its output. Inputs split by sequence
        # parallelism stay in 16 bits.
        alone = MLP_WIDTHS[model.mlp.activation] > 1
        kept_in_8_bits = 0 if layout.mlp_act else share.ffn * (-1.0 if alone else 1.0)
        entering = 0.0 if layout.sequence else 2.0 * hidden - outputs
        float8 = tokens * (entering + share.query + kept_in_8_bits)
    whole += float8
    if qk_norm:
        copied = sizes.source if sizes.source > size else 0
        whole += tokens * (copied * (share.query + share.kv) + share.heads * sizes.statistics)
    return whole, float8


def expert_bytes(model: ModelConfig, layout: Layout, micro_batch: int) -> float:
    """Return how many more bytes a block with experts keeps than one with an MLP: token rows at the
    experts' inputs and outputs, the experts' inner activations, and the router's scores. Assumes
    that tokens are spread evenly over the experts."""
    part, size = model.part(ExpertsConfig), 4 if layout.precision == "fp32" else 2
    tokens, k = micro_batch * model.seq_length / layout.context, part.moe_router_topk
    whole = layout.expert_tensor is not None
    rows = tokens * k / (layout.tensor if whole else 1)
    inner = (part.moe_ffn_hidden_size or 0) / (1 if whole else layout.tensor)
    width = part.moe_latent_size or model.hidden_size
    kept = mlp_widths(model)
    within = (part.moe_shared_expert_intermediate_size or 0) / layout.tensor
    if part.mlp_type == "standard":
        within -= local_widths(model, layout.tensor).ffn
    # Outputs that are scaled by a weight per token: those of shared experts, or of both MLPs.
    count = part.moe_shared_expert_gate + 2 * (part.mlp_type == "residual")
    scaled = count * model.hidden_size / (layout.tensor if layout.sequence else 1)
    # Scores, logits and the inputs of their gradients are counted as float32, the widest case.
    scores = 16.0 * tokens * max(part.layer_experts) / (layout.tensor if whole else 1)
    return size * (rows * (2 * width + inner * kept) + tokens * (within * kept + scaled)) + scores


def mlp_widths(model: ModelConfig, recomputed: bool = False) -> int:
    """Return the number of FFN-sized tensors that an MLP keeps for its backward pass. If it is
    ``recomputed``, only the activation's inputs are kept."""
    if recomputed:
        return 1 + model.mlp.gated
    clamped = model.mlp.activation_func_clamp_value is not None
    # The clamped gate, and the up projection by which it is multiplied.
    changes = clamped + (clamped or model.mlp.glu_linear_offset != 0)
    return MLP_WIDTHS[model.mlp.activation] + changes


def _all_scores(model: ModelConfig) -> bool:
    return (
        model.attention.attention_backend == "eager"
        or model.attention.attn_logit_softcapping is not None
        or (model.attention.softmax_type != "vanilla" and model.attention.attention_dropout > 0)
    )


def _in_blocks(layout: Layout) -> bool:
    """Return whether attention processes keys in blocks, without keeping all scores."""
    return layout.context > 1 and set(layout.comm) != {"a2a"}


def _attention_kernel(
    model: ModelConfig, layout: Layout, size: int, micro_batch: int, queries: int, keys: int
) -> float:
    """Return the bytes that attention keeps in addition to queries, keys, values and output."""
    tensor = layout.tensor
    heads = model.attention.num_attention_heads // tensor
    if not _all_scores(model) or _in_blocks(layout):
        return 4.0 * micro_batch * queries * heads  # log-sum-exp of the scores
    share, bounded = local_widths(model, tensor), model.attention.attn_logit_softcapping is not None
    dropped = 1 + size if model.attention.attention_dropout else 0
    # The softcap's output, the attention weights, dropout, and the mask of the scores.
    scores = queries * keys
    weights = micro_batch * heads * scores * (size * (1 + bounded) + dropped) + scores
    # Keys and values are repeated for all query heads of a group.
    return weights + 2.0 * size * micro_batch * keys * (share.query - share.kv)


def _masks(
    model: ModelConfig, layout: Layout, size: int, micro_batch: int, lengths: BlockLengths
) -> float:
    """Return the bytes of ALiBi or relative biases, or of the mask of a window shorter than the
    sequence. With eager attention, a window has no shared mask: each block keeps its own."""
    windows, length, tensor = set(model.windows), lengths.own, layout.tensor
    pairs = length * lengths.keys if layout.context > 1 else length**2
    if model.positions.position_embedding_type == "relative":
        # Encoder biases include each sample's padding. In a decoder, padding follows the tokens.
        heads = model.attention.num_attention_heads // tensor
        return float((1 if lengths.other else micro_batch) * heads * pairs * size)
    if _in_blocks(layout):
        return 0.0
    narrow = {w for w in windows if narrows(w, length)}
    kinds, heads = (0 if _all_scores(model) else len(narrow)), 1
    if model.positions.position_embedding_type == "alibi":
        kinds = len(narrow) + (narrow != windows)
        heads = model.attention.num_attention_heads // tensor
    return float(kinds * heads * pairs * size)


def _angles(model: ModelConfig, layout: Layout) -> float:
    """Return the bytes of RoPE's cosines and sines. Each block casts the shared float32 tables to
    16 bits."""
    if model.positions.position_embedding_type != "rope" or layout.precision == "fp32":
        return 0.0
    return 4.0 * 2 * model.seq_length / layout.context * model.rotated


def _chunks(model: ModelConfig, layout: Layout, sizes: _Sizes, saving: LongContextConfig) -> float:
    """Return :attr:`Activations.chunks`: the queries, keys, values and output."""
    if not chunked_on_host(saving, layout, model.seq_length):
        return 0.0
    share = local_widths(model, layout.tensor)
    return sizes.tokens * sizes.element * (2.0 * share.query + 2 * share.kv)


def _working(
    model: ModelConfig,
    layout: Layout,
    sizes: _Sizes,
    lengths: BlockLengths,
    saving: LongContextConfig,
) -> float:
    """Return :attr:`Activations.working`: hidden states and their gradients, plus the temporary
    memory of the backward pass of attention or of the MLP, whichever is larger."""
    if saving == WHOLE and layout.context == 1:
        return 0.0
    share, hidden, size = local_widths(model, layout.tensor), model.hidden_size, sizes.element
    tokens, ranks = sizes.tokens, layout.context
    # Gradients of the output, queries, keys and values, and of the QKV output. The MLP's norm and
    # the block's output are already freed. Attention in blocks first accumulates float32 gradients.
    attention = tokens * size * (2.0 * share.query + 4 * share.kv)
    attention -= sizes.outside * (sizes.norm(hidden) + size * hidden)
    if _in_blocks(layout):
        attention += tokens * 4.0 * (share.query + 2 * share.kv)
        heads = [heads_of(kind.model, layout.tensor) for kind in block_kinds(model)]
        attention += max(key_bytes_on_the_way(layout, each, tokens, size) for each in heads)
    if chunked_on_host(saving, layout, model.seq_length):
        # For a chunk: queries and outputs with gradients, keys and values with gradients, and the
        # next chunk's. For all keys and values: gradients in float32.
        chunk = min(1.0, saving.ds_sequence_parallel_fpdt_chunk_size / lengths.keys)
        of_chunk = (2 * size + 8) * share.query + (4 * size + 16) * share.kv
        attention += tokens * (chunk * of_chunk + 8.0 * share.kv)
    inner = share.ffn * (mlp_widths(model) + 1 + model.mlp.gated)
    mlp: float = tokens * size * inner
    if saving.tiles:
        length = lengths.own // sizes.slices
        whole = saving.tile(length, lengths.own, hidden, ranks) * sizes.slices
        weights = (2 + model.mlp.gated) * hidden * share.ffn
        # Weight gradients are accumulated in float32.
        mlp = min(1.0, whole / lengths.own) * mlp + tokens * size * hidden + 8.0 * weights
    # Gradients of input and output, and the recomputed output.
    return 3 * sizes.outside * sizes.residual * hidden + max(attention, mlp)
