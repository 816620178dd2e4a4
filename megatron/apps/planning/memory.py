"""Memory of one rank, in bytes: weights, gradients, optimizer state, buffers, activations.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198): a block of GPT-2's shape keeps ``s b
h (34 + 5 a s / h)`` bytes of 16-bit activations with dropout (equation 1), ``10 + 24 / t`` of the
34 with tensor parallelism (equation 2) and ``34 / t`` with sequence parallelism (equation 4). They
are counted tensor by tensor, which covers other shapes. Only the eager attention kernel has the
term in s^2: flash kernels keep their output and one number per query (Dao et al. 2022,
arXiv:2205.14135). That compiled blocks keep less, and ``--activation-memory-budget`` still less, is
not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from megatron.apps.planning.parameters import (
    RankShare,
    adapter_parameters,
    head_shape,
    linear_parameters,
    local_widths,
    norms_of_block,
    rank_shares,
)
from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.families import BlockLengths, family_of
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.nf4 import bytes_of
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.low_bit_states.state_formats import state_formats
from megatron.parallel.cross_entropy import logits_chunk

REDUCE_BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size, in elements

LIVE_PARAMETERS = 1_000_000_000  # elements: DeepSpeed's stage3_max_live_parameters

MLP_WIDTHS = {
    "gelu_tanh": 2, "gelu_erf": 2, "relu": 1, "squared_relu": 2, "swiglu": 4, "geglu": 4,
    "quick_geglu": 5,
}  # fmt: skip
"""Inner widths that an MLP keeps, by activation: its input and output; of a ReLU the output only;
of a gated MLP gate, up, activated gate and their product, and the sigmoid of quick_geglu."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of a rank's share of the model, at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_bytes(layout: Layout, replicas: int | None = None) -> StateBytes:
    """Return the bytes per parameter with Adam, as DeepSpeed 0.19's engine has them at its
    optimizer step, of parameters with so many replicas (default: one on each data-parallel rank).

    ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5) partitions optimizer state at stage
    1, gradients at 2 and parameters at 3. DeepSpeed also copies the gradients that a rank updates
    to float32, at stage 3 and in fp16, and keeps separate main weights for float32 too. At stage 0
    bf16 runs as autocast over float32 weights, and fp16 replaces one gradient after the other by
    its copy.
    """
    data, zero = replicas or layout.data, layout.running_zero
    if zero == 0:
        half = layout.precision == "fp16"
        return StateBytes(2.0, 4.0, 12.0) if half else StateBytes(4.0, 4.0, 8.0)
    size = 4 if layout.precision == "fp32" else 2
    accumulated = 4 if layout.grads_in_fp32 else size
    if layout.states is not None:
        gradients = accumulated / (data if zero == 2 else 1)
        return StateBytes(2.0, gradients, state_formats(layout.states).bytes / data)
    copied = 4 if zero == 3 or layout.precision == "fp16" else 0
    if zero == 1:
        # Whole until they are reduced. Its bf16 optimizer accumulates beside the 16-bit gradients.
        beside = size if accumulated > size and layout.precision == "bf16" else 0
        gradients = max(accumulated + beside, (size + copied) / data)
    elif zero == 2 and accumulated > size:
        gradients = accumulated / data
    else:
        gradients = (accumulated + copied) / data
    return StateBytes(size / (data if zero == 3 else 1), gradients, 12 / data)


def bucket_bytes(layout: Layout) -> int:
    """Return the bytes per element of all buckets of a rank's gradients together.

    At stage 1 a pipeline has two, one of which DeepSpeed allocates for its own backward pass. At
    stage 0 and in the bf16 optimizer the bucket is a copy of the accumulated gradients. Stage 2
    reduces each micro batch's gradients and accumulates them afterwards.
    """
    zero = layout.running_zero
    if layout.data == 1 and zero < 3 and not (zero == 2 and layout.grads_in_fp32):
        return 0  # gradients stay where the backward pass puts them
    size = 4 if layout.precision == "fp32" or layout.autocast else 2
    if zero == 1 and layout.grads_in_fp32 and layout.precision == "bf16":
        return 4
    if layout.grads_in_fp32 and zero != 2:
        size = 4
    return size * (2 if zero == 1 and layout.pipeline > 1 else 1)


def buffer_bytes(layout: Layout, parameters: float, trained: float | None = None) -> float:
    """Return the bytes of temporary buffers in a step, with DeepSpeed's default sizes: buckets of
    gradients of the ``trained`` parameters (default: all), the gathered parameters of stage 3, and
    autocast's 16-bit weights at stage 0, which are freed before the buckets."""
    buckets = float(
        min(REDUCE_BUCKET, parameters if trained is None else trained) * bucket_bytes(layout)
    )
    if layout.zero == 0:
        if layout.precision == "fp16" and not layout.grads_in_fp32:
            return 0.0  # no more than what the float32 copies of the gradients take later
        return max(buckets, 2.0 * parameters if layout.autocast else 0.0)
    if layout.zero == 3 and layout.data > 1:
        return buckets + min(LIVE_PARAMETERS, parameters) * (4 if layout.precision == "fp32" else 2)
    return buckets


@dataclass(frozen=True)
class Activations:
    """Bytes that a micro batch keeps for its backward pass on one rank, in a block with certain
    sequences and in the layers around such blocks.

    Attributes:
        block: one block, computed in 8 bits where the layout is.
        float8: the part of it that 8 bits add, mostly less than 0.
        recomputed: one block while it is computed again; 0 without full recomputation.
        masks: attention masks and the input of cross-attention, which the blocks of a rank share.
        head: final norm, and the gradients of the head, which are computed with the loss.
        loss: a chunk of logits, while the loss is computed.
        hidden: the tensors that are sent from one stage to the next.
    """

    block: float
    float8: float
    recomputed: float
    embedding: float
    masks: float
    head: float
    loss: float
    hidden: float


@dataclass(frozen=True)
class _Sizes:
    """Numbers from which the tensors of a micro batch are counted.

    Attributes:
        element: bytes of an element; ``residual`` in the residual stream, ``source`` in a norm's
            input.
        statistics: bytes per token that a norm keeps with its input.
        mask: bytes of a dropout mask per token.
        tokens: of the block's own sequences, ``others`` of those that its cross-attention reads;
            ``slices`` ranks share them outside the matrices.
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
            # A norm weight plus 1 is applied in float32, to a copy of the input.
            source=4 if model.norm.apply_layernorm_1p else residual,
            statistics=4 * model.norm.traits.statistics,
            mask=model.hidden_size if model.hidden_dropout else 0,
            tokens=micro_batch * lengths.own,
            others=micro_batch * lengths.other,
            slices=layout.tensor if layout.sequence else 1,
        )

    @property
    def outside(self) -> float:
        """Tokens of this rank outside the matrices."""
        return self.tokens / self.slices

    def norm(self, hidden: int) -> int:
        """Return the bytes that a norm keeps per token."""
        return self.source * hidden + self.statistics


@lru_cache(maxsize=4096)
def activation_bytes(
    model: ModelConfig, layout: Layout, micro_batch: int, lengths: BlockLengths | None = None
) -> Activations:
    """Return the bytes of a block with these ``lengths``, by default those of the model's first."""
    lengths = lengths or family_of(model.family).block_lengths(model)[0]
    sizes, hidden = _Sizes.of(model, layout, micro_batch, lengths), model.hidden_size
    whole = float8 = kernel = 0.0
    for part in lengths.whole:
        keys = [part.keys, *([part.other_keys] if part.other else [])]
        kept_by_kernels = sum(
            _attention_kernel(model, layout.tensor, sizes.element, micro_batch, part.own, count)
            for count in keys
        )
        part_sizes = _Sizes.of(model, layout, micro_batch, part)
        kept_by_block, added = _block_bytes(model, layout, part_sizes, kept_by_kernels)
        whole, float8, kernel = whole + kept_by_block, float8 + added, kernel + kept_by_kernels
    vocab = local_widths(model, layout.tensor).vocab
    outputs = micro_batch * min(lengths.own, head_shape(model)[0])
    logits = outputs * sizes.element * vocab
    most, _ = logits_chunk("cuda", sizes.element * vocab, None, compiled=True)
    assert most is not None
    chunk = min(logits, most * sizes.element * vocab)
    learned = model.positions.position_embedding_type == "learned_absolute"
    ids = 8 * (sizes.tokens + (lengths.own if learned else 0))
    full = layout.recompute in ("uniform", "block")
    between = sizes.outside * sizes.residual * hidden
    # The other sequence is read by all blocks; the one with blocks inside makes it of as much.
    read = sizes.others / sizes.slices * sizes.residual * hidden
    entering = between + read * bool(lengths.inside)
    kept = entering if full else whole - kernel * (layout.recompute == "selective")
    norm = sizes.norm(hidden)
    return Activations(
        block=kept,
        float8=0.0 if full else float8,
        recomputed=whole if full else 0.0,
        embedding=sizes.outside * (sizes.mask + norm * model.norm.embed_layernorm) + ids,
        masks=_masks(model, layout.tensor, sizes.element, micro_batch, lengths) + read,
        # Gradients of several chunks are added up in float32.
        head=sizes.outside * norm
        + outputs * sizes.element * hidden * (1 + family_of(model.family).head_states)
        + vocab * hidden * (sizes.element if chunk == logits else 4),
        loss=chunk,
        hidden=between + read,
    )


def _block_bytes(
    model: ModelConfig, layout: Layout, sizes: _Sizes, kernel: float
) -> tuple[float, float]:
    """Return the bytes of a block with its attention kernels, and the part of them that 8 bits
    add."""
    share, hidden = local_widths(model, layout.tensor), model.hidden_size
    size, tokens, cross = sizes.element, sizes.tokens, sizes.others > 0
    qk_norm = model.norm.qk_layernorm
    # Where keys and values are repeated, and queries and keys rotated, the QKV output is not kept.
    repeated = _all_scores(model) and share.query > share.kv
    rope = model.positions.position_embedding_type == "rope"
    needless = repeated and rope and not qk_norm and layout.recompute is None
    qkv = share.kv if needless else share.query + 2 * share.kv
    # Queries and keys that are normalised or rotated are new tensors; the values still keep the
    # whole QKV output.
    changed = share.query + share.kv if rope or qk_norm else 0
    mlp = share.ffn * mlp_widths(model)
    inputs = norms_of_block(model, cross) * sizes.norm(hidden)
    alike = model.parallel_residual and not model.shared_parallel_norm
    if alike and sizes.source == sizes.residual:
        inputs -= sizes.source * hidden  # two norms of the same input keep it once
    outputs = ((1 if model.shared_parallel_norm else 2) + cross) * size * hidden
    whole = sizes.outside * (inputs + outputs + (2 + cross) * sizes.mask) + _angles(model, layout)
    whole += tokens * size * (qkv + changed + share.query + mlp)
    if cross:
        # Queries and the attention's output, and keys and values of the other sequence.
        whole += size * 2 * (tokens * share.query + sizes.others * share.kv)
    whole += kernel
    float8 = 0.0
    if layout.float8:
        # Inputs of 8-bit layers: a byte per number instead of the number, or with it where
        # attention or a ReLU keeps its output too. Split sequences stay as they are.
        alone = MLP_WIDTHS[model.mlp.activation] > 1
        entering = 0.0 if layout.sequence else 2.0 * hidden - outputs
        float8 = tokens * (entering + share.query + share.ffn * (-1.0 if alone else 1.0))
    whole += float8
    if qk_norm:
        copied = sizes.source if sizes.source > size else 0
        heads = (share.query + share.kv) / model.attention.kv_channels
        whole += tokens * heads * (copied * model.attention.kv_channels + sizes.statistics)
    return whole, float8


def expert_bytes(model: ModelConfig, layout: Layout, micro_batch: int) -> float:
    """Return the bytes that a block with experts keeps more than one with an MLP, in 16 bits or
    float32: rows of tokens as they enter and leave their experts, and what is within; scores of all
    experts. Every expert has its even share of the tokens."""
    part, size = model.part(ExpertsConfig), 4 if layout.precision == "fp32" else 2
    tokens, k = micro_batch * model.seq_length, part.moe_router_topk
    whole = layout.expert_tensor is not None
    rows = tokens * k / (layout.tensor if whole else 1)
    inner = (part.moe_ffn_hidden_size or 0) / (1 if whole else layout.tensor)
    width = part.moe_latent_size or model.hidden_size
    kept = mlp_widths(model)
    within = (part.moe_shared_expert_intermediate_size or 0) / layout.tensor
    if part.mlp_type == "standard":
        within -= local_widths(model, layout.tensor).ffn
    # Outputs that a weight of the token multiplies: of shared experts, or of both MLPs.
    count = part.moe_shared_expert_gate + 2 * (part.mlp_type == "residual")
    scaled = count * model.hidden_size / (layout.tensor if layout.sequence else 1)
    # Scores, logits and the inputs of their gradients are in float32 at most.
    scores = 16.0 * tokens * max(part.layer_experts) / (layout.tensor if whole else 1)
    return size * (rows * (2 * width + inner * kept) + tokens * (within * kept + scaled)) + scores


def mlp_widths(model: ModelConfig) -> int:
    """Return the inner widths that an MLP keeps for its backward pass."""
    clamped = model.mlp.activation_func_clamp_value is not None
    # The clamped gate, and the up projection that it multiplies.
    changes = clamped + (clamped or model.mlp.glu_linear_offset != 0)
    return MLP_WIDTHS[model.mlp.activation] + changes


def float8_bytes(model: ModelConfig, layout: Layout, blocks: int) -> float:
    """Return the bytes of the 8-bit weights of this many blocks, in both layouts; at stage 3 each
    is cast where it is used."""
    kept = layout.running_zero < 3
    return 2.0 * blocks * linear_parameters(model, layout.tensor) if kept else 0.0


def _all_scores(model: ModelConfig) -> bool:
    return (
        model.attention.attention_backend == "eager"
        or model.attention.attn_logit_softcapping is not None
        or (model.attention.softmax_type != "vanilla" and model.attention.attention_dropout > 0)
    )


def _attention_kernel(
    model: ModelConfig, tensor: int, size: int, micro_batch: int, queries: int, keys: int
) -> float:
    """Return the bytes that attention keeps besides queries, keys, values and its output."""
    heads = model.attention.num_attention_heads // tensor
    if not _all_scores(model):
        return 4.0 * micro_batch * queries * heads  # the log of the softmax's sum
    share, bounded = local_widths(model, tensor), model.attention.attn_logit_softcapping is not None
    dropped = 1 + size if model.attention.attention_dropout else 0
    # The softcap's output, weights, dropout, and the mask of the scores.
    scores = queries * keys
    weights = micro_batch * heads * scores * (size * (1 + bounded) + dropped) + scores
    # Keys and values are repeated for the query heads that share them.
    return weights + 2.0 * size * micro_batch * keys * (share.query - share.kv)


def _masks(
    model: ModelConfig, tensor: int, size: int, micro_batch: int, lengths: BlockLengths
) -> float:
    """Return the bytes of ALiBi's or of relative biases, or of the mask of a window shorter than
    the sequence. Eager attention keeps a mask in every block instead."""
    windows, length = set(model.windows), lengths.own
    if model.positions.position_embedding_type == "relative":
        # With each sample's padding in them; that of a decoder follows its tokens.
        heads = model.attention.num_attention_heads // tensor
        return float((1 if lengths.other else micro_batch) * heads * length**2 * size)
    narrow = {w for w in windows if w is not None and w < length}
    kinds, heads = (0 if _all_scores(model) else len(narrow)), 1
    if model.positions.position_embedding_type == "alibi":
        kinds = len(narrow) + (narrow != windows)
        heads = model.attention.num_attention_heads // tensor
    return float(kinds * heads * length**2 * size)


def _angles(model: ModelConfig, layout: Layout) -> float:
    """Return the bytes of RoPE's cosines and sines: every block casts the shared float32 tables to
    16 bits."""
    if model.positions.position_embedding_type != "rope" or layout.precision == "fp32":
        return 0.0
    rotated = int(model.attention.kv_channels * model.positions.rotary_percent)
    return 4.0 * 2 * model.seq_length * rotated


def stages_in_flight(layout: Layout, rank: int, micro_batches: int) -> int:
    """Return the largest number of stage inputs that a pipeline rank has at once. 1F1B and
    interleaved by Narayanan et al. 2021 (arXiv:2104.04473, section 2.2): p - r, and 2 (p - r - 1) +
    (v - 1) p + 1 stages, all of them with a single group of micro batches. This project's DualPipeV
    has 2 p + 1 stages on every rank."""
    p, v, m = layout.pipeline, layout.chunks, micro_batches
    if p == 1:
        return 1
    if layout.schedule == "1f1b":
        return min(m, p - rank)
    if layout.schedule == "dualpipev":
        return min(2 * m, 2 * p + 1)
    return m * v if m == p else min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.buffers + self.activations


def rank_memory(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    micro_batches: int,
    share: RankShare,
    adapters: AdapterConfig | None = None,
) -> Memory:
    """Return the memory of a rank with this share of the complete model, whose vocabulary is padded
    for the layout. With ``adapters`` those alone have gradients and optimizer state, and with
    ``--qlora`` the linear layers of blocks are in 4 bits; the small products of adapters are not
    counted."""
    kept = {
        lengths: activation_bytes(model, layout, micro_batch, lengths)
        for lengths in dict.fromkeys(chain(*share.stages))
    }
    flying = stages_in_flight(layout, share.rank, micro_batches)
    more, full = 0.0, layout.recompute in ("uniform", "block")
    if any(share.routed) and not model.part(ExpertsConfig).idle:
        more = expert_bytes(model, layout, micro_batch)
    stage = max(
        _stage_bytes(layout, [kept[lengths] for lengths in blocks], float8)
        + (0.0 if full else more * routed)
        for blocks, float8, routed in zip(
            share.stages, share.float8, share.routed or (0,) * len(share.stages), strict=True
        )
    )
    first = 0.0
    if share.first:
        first = -(-flying // layout.chunks) * kept[share.stages[0][0]].embedding
    # Loss and logits are gone before the first block is computed again.
    top = max(each.recomputed for each in kept.values()) + max(0.0, more) * full
    if share.last:
        head = kept[share.stages[-1][-1]]
        top = max(top, head.head + head.loss)
    state, added = state_bytes(layout), 0.0
    of_experts = state_bytes(layout, layout.data // layout.expert_axis)
    if adapters is not None:
        added = sum(share.blocks) * adapter_parameters(model, adapters, layout.tensor)
    parameters, trained = share.parameters + added, added or share.parameters
    weights = state.weights * parameters + float8_bytes(model, layout, sum(share.float8))
    weights += (of_experts.weights - state.weights) * share.experts
    trained_experts = 0 if added else share.experts
    if adapters is not None and adapters.qlora:
        # In 4 bits, whole on every data-parallel rank at every stage.
        linear = sum(share.blocks) * linear_parameters(model, layout.tensor)
        weights += bytes_of(linear, adapters.qlora_double_quant) - state.weights * linear
    return Memory(
        weights,
        state.gradients * trained + (of_experts.gradients - state.gradients) * trained_experts,
        state.optimizer * trained + (of_experts.optimizer - state.optimizer) * trained_experts,
        buffer_bytes(layout, parameters, trained),
        flying * stage + first + top,
    )


def _stage_bytes(layout: Layout, blocks: Sequence[Activations], float8: int) -> float:
    """Return the bytes of a micro batch in a stage, ``float8`` of whose blocks compute in 8
    bits."""
    shared = {(kept.masks, kept.hidden) for kept in blocks}
    total = sum(masks for masks, _ in shared) + sum(kept.block for kept in blocks)
    total -= sum(kept.float8 for kept in blocks) * (len(blocks) - float8) / len(blocks)
    # A sent output is kept until its gradient arrives.
    return total + blocks[-1].hidden * (layout.pipeline > 1)


def peak_memory(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    micro_batches: int,
    float8: range | None = None,
    adapters: AdapterConfig | None = None,
) -> Memory:
    """Return the memory of the rank that needs most; ``float8`` as for :func:`rank_shares`."""
    memories = [
        rank_memory(model, layout, micro_batch, micro_batches, share, adapters)
        for share in rank_shares(model, layout, float8=float8)
    ]
    return max(memories, key=lambda memory: memory.total)
