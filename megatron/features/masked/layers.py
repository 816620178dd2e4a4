"""Layers of BERT and T5.

BERT is an encoder with two heads, or with one for labelled text. Megatron's BERT has pre-norm
blocks. With ``--apply-residual-connection-post-layernorm`` it is the original: the first block's
first norm normalises the embeddings, and the others follow the residual sums. T5 has an encoder,
and a decoder whose blocks also attend to the encoder's output.

Shapes: B batch, S sequence (a rank's slice of it in a sequence-parallel region), H hidden, P
predicted positions, N heads, D distances.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ConfigError, ModelConfig, ParallelConfig
from megatron.features.cross_attention.layers import CrossBlock
from megatron.features.masked.flags import EncoderDecoderConfig
from megatron.features.masked.heads import head_layers, pooler
from megatron.model.activations import ACTIVATIONS
from megatron.model.attention_masks import AttentionKind, AttentionMasks, tensor_cache
from megatron.model.block import Block
from megatron.model.embedding import InputEmbedding, vocabulary_layers, word_embeddings
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.norm import FinalNorm, build_norm
from megatron.model.spec import ModelSpec
from megatron.parallel.context import Context
from megatron.parallel.layers import WholeLinear
from megatron.parallel.shard import Cut, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel, autocast_dtype

SOP_LOSS = "sop loss"
"""Name of the binary head's loss, for either task: sentence order or next sentence."""

NO_ORDER = -1
"""Label of a sample without pairs, which is excluded from the binary head's loss."""


class BinaryHead(WholeLinear):
    """Head that predicts whether a sample's second segment is random, or the segments are
    swapped."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, 2, bias=model.mlp.bias, init=init, tp=tp.whole)

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """Replace ``pooled`` [B, H] with logits [B, 2], or with a loss if the state has targets."""
        assert state.pooled is not None
        logits_B2 = super().forward(state.pooled)
        if state.targets is None:
            return state.changed(pooled=logits_B2)
        loss = order_loss(logits_B2, state.batch.is_random_B)
        return state.changed(pooled=None).with_loss(SOP_LOSS, loss)


def order_loss(logits_B2: Tensor, labels_B: Tensor) -> Tensor:
    """Return the mean cross entropy over samples whose label is not :data:`NO_ORDER`, a scalar,
    float32 or float64. It is zero without such samples."""
    logits_B2 = logits_B2.to(torch.promote_types(logits_B2.dtype, torch.float32))
    total = F.cross_entropy(logits_B2, labels_B, ignore_index=NO_ORDER, reduction="sum")
    return total / (labels_B != NO_ORDER).sum().clamp(min=1)


class LMTransform(nn.Module):
    """Layers between the hidden states and the output head: a dense layer, its activation and a
    norm. If the state has targets, only the predicted positions, about a seventh, are computed."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        width, init = model.hidden_size, initial(model)
        self.tp = tp
        self.activation = ACTIVATIONS[model.head_activation]
        self.dense = WholeLinear(width, width, bias=model.mlp.bias, init=init, tp=tp)
        self.norm = build_norm(model, tp)

    def forward(self, state: LayerState) -> LayerState:
        """Transform [B, S, H] to [B, S, H], or to [B, P, H] if the state has targets."""
        if state.targets is not None:
            hidden, targets = state.targets.taken(state.hidden, self.tp)
            state = state.changed(hidden=hidden, targets=targets._replace(positions_BP=None))
        return state.with_hidden(self.norm(self.activation(self.dense(state.hidden))))


def bert_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """Return the layers of a BERT: embeddings, blocks, final norm, then the optional binary head
    and the masked-LM head, or a head for labelled text. ``tp`` is None for a single process."""
    tp = tp or TensorParallel()
    selective = "core_attn" in parallel.recomputed_modules
    if model.head == "lm":
        words, head = vocabulary_layers(model, parallel, tp, head_bias=True)
        second_head = [
            pooler(model, tp),
            LayerSpec("binary_head", partial(BinaryHead, model, tp)),
        ]
        heads = [
            *(second_head if model.bert_binary_head else ()),
            LayerSpec("lm_head", partial(LMTransform, model, tp)),
            head,
        ]
    else:
        words, heads = word_embeddings(model, tp), head_layers(model, tp)
    return [
        words,
        LayerSpec("embedding", partial(InputEmbedding, model, tp, model.token_types)),
        *(
            LayerSpec(f"layers.{n}", partial(Block, model, n, tp, selective, "full"), block=True)
            for n in range(model.num_layers)
        ),
        LayerSpec("final_norm", partial(FinalNorm, model, tp)),
        *heads,
    ]


_FIRST_BLOCKS = ("layers.0", "encoder.layers.0", "decoder.layers.0")


def without_first_norm(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """Return the model specification without the norm before the first attention of each stack."""
    if model.fp32_residual_connection:
        raise ConfigError(
            "--no-first-norm contradicts --fp32-residual-connection, which would give the first "
            "attention inputs in float32; leave one of them out"
        )

    def built(layer: LayerSpec) -> nn.Module:
        block = layer.build()
        block.attention_norm = nn.Identity()
        return block

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        return [
            replace(each, build=partial(built, each)) if each.name in _FIRST_BLOCKS else each
            for each in spec.layers(tp)
        ]

    return replace(spec, layers=layers)


def leave_encoder(last: nn.Module, state: LayerState) -> LayerState:
    """Apply the last layer of a first stack, whose output a later stage gets as ``encoder``."""
    state = last(state)
    return state.changed(encoder=state.hidden)


def _enter_decoder(context: Context, table: nn.Module, state: LayerState) -> LayerState:
    tokens = context.take(state.batch.decoder_tokens_BD, 1)
    return table(_in_decoder(context, state).changed(hidden=tokens, bias=None))


def _in_decoder(context: Context, state: LayerState) -> LayerState:
    """Return the state with the decoder's position ids."""
    if context.size == 1:
        return state
    tokens_BD = state.batch.decoder_tokens_BD
    return state.changed(position_ids=context.positions(tokens_BD.shape[1], tokens_BD.device)[None])


def _decoder_block(context: Context, block: nn.Module, state: LayerState) -> LayerState:
    return block(_in_decoder(context, state))


def decoder_start(model: ModelConfig) -> int:
    """Return the index of the layer that embeds the decoder's tokens. The encoder's output passes
    through it."""
    relative = model.positions.position_embedding_type == "relative"
    return 2 + model.num_layers * (1 + relative) + 1


def t5_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """Return the layers of a T5: token embedding, positions, blocks and final norm of the encoder
    and of the decoder, then the head. Encoder and decoder share token embeddings and, by default,
    position embeddings. ``tp`` is None for a single process."""
    tp = tp or TensorParallel()
    assert model.decoder_num_layers is not None
    selective = "core_attn" in parallel.recomputed_modules
    learned = model.positions.position_embedding_type == "learned_absolute"
    relative = model.positions.position_embedding_type == "relative"
    part = model.part(EncoderDecoderConfig)
    # The head has a bias as in Megatron. The original T5, with relative positions, has none.
    usual = learned and model.mlp.bias and not part.separate_decoder_embedding
    head_bias = usual or model.embedding.lm_head_bias
    words, head = vocabulary_layers(model, parallel, tp, head_bias)
    words = replace(words, tied_key="embed")
    shared = "positions" if learned or model.norm.embed_layernorm else None
    positions = LayerSpec("embedding", partial(InputEmbedding, model, tp), shared)
    into_decoder = replace(positions, with_next_block=True)
    if shared and part.separate_decoder_embedding:
        positions = replace(positions, tied_key=None)
        into_decoder = replace(into_decoder, name="decoder.embedding", tied_key=None)

    def stack(
        name: str, blocks: int, cost: int, kind: AttentionKind, cross: bool
    ) -> list[LayerSpec]:
        shared_bias = LayerSpec(
            f"{name}.relative_bias",
            partial(RelativeBias, model, tp, causal=kind == "causal"),
            f"{name}_bias",
            with_next_block=True,
            once_per_stage=True,
        )
        layers = []
        for n in range(blocks):
            bias = shared_bias
            if part.relative_attention_per_block:
                bias = replace(bias, name=f"{name}.biases.{n}", tied_key=None, once_per_stage=False)
            block = partial(CrossBlock if cross else Block, model, n, tp, selective, kind)
            layer = LayerSpec(f"{name}.layers.{n}", block, block=True, cost=cost)
            if cross and tp.context.size > 1:
                layer = replace(layer, forward=partial(_decoder_block, tp.context))
            layers += [*[bias] * relative, layer]
        norm = LayerSpec(f"{name}.final_norm", partial(FinalNorm, model, tp))
        return [*layers, norm if cross else replace(norm, forward=leave_encoder)]

    of_encoder, of_decoder = block_costs(model)
    return [
        words,
        positions,
        *stack("encoder", model.num_layers, of_encoder, "full", cross=False),
        replace(words, forward=partial(_enter_decoder, tp.context), with_next_block=True),
        into_decoder,
        *stack("decoder", model.decoder_num_layers, of_decoder, "causal", cross=True),
        head,
    ]


def block_costs(model: ModelConfig) -> tuple[int, int]:
    """Return the multiplications per sample in an encoder block and in a decoder block, by which
    pipeline stages are balanced."""
    attention, mlp = model.attention, model.mlp
    encoded = model.seq_length
    decoded = encoded if model.decoder_seq_length is None else model.decoder_seq_length
    query = attention.num_attention_heads * attention.kv_channels
    kv = attention.num_query_groups * attention.kv_channels
    queries, keys = 2 * model.hidden_size * query, 2 * model.hidden_size * kv
    gates = model.hidden_size * (attention.query_rows - query)
    inner = (3 if mlp.gated else 2) * model.hidden_size * mlp.ffn_hidden_size
    encoder = encoded * (queries + gates + keys + inner) + 2 * query * encoded**2
    own = decoded * (queries + gates + keys + inner) + query * decoded**2
    cross = decoded * queries + encoded * keys + 2 * query * decoded * encoded
    return encoder, own + cross


class RelativeBias(nn.Module):
    """Layer that computes the relative position bias, ``bias`` of the state, which the blocks of a
    stack add to their attention scores. A rank has the columns of ``weight`` [buckets, heads] of
    its own heads. With ``causal``, all buckets are for earlier tokens, as later ones are masked."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, causal: bool) -> None:
        super().__init__()
        positions, heads = config.positions, config.attention.num_attention_heads
        self.buckets = positions.relative_attention_num_buckets
        self.furthest = positions.relative_attention_max_distance
        self.tp, self.causal = tp, causal
        self.weight = parameter(
            Shard((self.buckets, heads), (Cut(1),)), initial(config), tp.coordinates
        )

    def forward(self, state: LayerState) -> LayerState:
        """Compute the bias, and leave the hidden states unchanged."""
        if state.cache is not None:
            return state.changed(bias=self._by_distance(state.cache.positions))
        x_BSH = state.hidden
        context, device = self.tp.context, x_BSH.device
        length = x_BSH.shape[1] * self.tp.slices * context.size
        places_D = distance_buckets(length, self.buckets, self.furthest, self.causal, device)
        of_distances_ND = self.weight[places_D].t()
        # Query i attends to key j at distance j - i, so its row is a window over the distances,
        # shifted left by one for each query. The gradient then has the size of the D distances
        # instead of the S x S scores. Context-parallel ranks keep the rows of their own queries.
        width, pieces = length // (2 * context.size), context.pieces
        spans = (
            [(0, length)] if context.size == 1 else [(n * width, (n + 1) * width) for n in pieces]
        )
        parts = [
            of_distances_ND[:, length - end : 2 * length - 1 - first].unfold(-1, length, 1).flip(-2)
            for first, end in spans
        ]
        bias_NsS = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(autocast_dtype(x_BSH))
        masks = state.masks or AttentionMasks()
        unseen = masks.bias(length, length, None, (), bias_NsS, self.causal)
        unseen = context.take(unseen, -2) if unseen.dim() and unseen.shape[-2] > 1 else unseen
        return state.changed(bias=bias_NsS.unsqueeze(0) + unseen)

    def _by_distance(self, positions: int) -> Tensor:
        """Return the bias, [N, T], of keys T - 1 to 0 positions before the query."""
        device = self.weight.device
        places_D = distance_buckets(positions, self.buckets, self.furthest, self.causal, device)
        return self.weight[places_D[:positions].flip(0)].t()


def relative_bucket(distance: Tensor, buckets: int, furthest: int, causal: bool) -> Tensor:
    """Return the buckets, int64, of distances from queries to keys (key minus query position).

    Args:
        buckets: number of buckets. Half of them are for later keys, unless ``causal``, which puts
            all later keys into bucket 0.
        furthest: distance from which on all keys share a bucket; more than ``buckets`` / 2.
    """
    offset = torch.zeros_like(distance)
    if causal:
        distance = (-distance).clamp(min=0)
    else:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    alone = buckets // 2
    # Computed in float32 as elsewhere, because bucket boundaries depend on the rounding.
    share = torch.log(distance.clamp(min=1).float() / alone) / math.log(furthest / alone)
    shared = (alone + (share * (buckets - alone)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < alone, distance, shared)


@tensor_cache(64)
def distance_buckets(
    length: int, buckets: int, furthest: int, causal: bool, device: torch.device
) -> Tensor:
    """Return the buckets [D] of the distances 1 - S to S - 1, cached for each device."""
    distances = torch.arange(1 - length, length)
    # Computed on the CPU: a GPU's logarithm may round differently.
    return relative_bucket(distances, buckets, furthest, causal).to(device)
