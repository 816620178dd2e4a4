"""T5 as a list of layers: an encoder, and a decoder that attends to its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.features.masked.relative_bias import RelativeBias
from megatron.model.attention_masks import AttentionKind
from megatron.model.block import Block
from megatron.model.embedding import InputEmbedding, vocabulary_layers
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.norm import FinalNorm
from megatron.parallel.tensor_parallel import TensorParallel


def _enter_decoder(table: nn.Module, state: LayerState) -> LayerState:
    tokens = state.batch.decoder_tokens_BD
    return table(state.changed(hidden=tokens, encoder=state.hidden, bias=None))


def decoder_start(model: ModelConfig) -> int:
    """Index of the layer that takes the decoder's tokens; what it gets is the encoder's output."""
    relative = model.positions.position_embedding_type == "relative"
    return 2 + model.num_layers * (1 + relative) + 1


def t5_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """The layers of a T5: of encoder and decoder each the token embedding, positions, blocks and
    final norm; then the head. Both share token and position embeddings. ``tp`` is None for a single
    process."""
    tp = tp or TensorParallel()
    assert model.decoder_num_layers is not None
    selective = parallel.recompute_granularity == "selective"
    learned = model.positions.position_embedding_type == "learned_absolute"
    relative = model.positions.position_embedding_type == "relative"
    # As in Megatron; the original T5, whose positions are relative, has no biases.
    head_bias = learned and model.mlp.bias
    words, head = vocabulary_layers(model, parallel, tp, head_bias)
    words = replace(words, tied_key="embed")
    shared = "positions" if learned or model.norm.embed_layernorm else None
    positions = LayerSpec("embedding", partial(InputEmbedding, model, tp), shared)

    def stack(
        name: str, blocks: int, cost: int, kind: AttentionKind, cross: bool
    ) -> list[LayerSpec]:
        bias = LayerSpec(
            f"{name}.relative_bias",
            partial(RelativeBias, model, tp, causal=kind == "causal"),
            f"{name}_bias",
            with_next_block=True,
            once_per_stage=True,
        )
        layers = []
        for n in range(blocks):
            block: Callable[[], nn.Module] = partial(Block, model, n, tp, selective, kind, cross)
            layers += [bias] * relative
            layers.append(LayerSpec(f"{name}.layers.{n}", block, block=True, cost=cost))
        return [*layers, LayerSpec(f"{name}.final_norm", partial(FinalNorm, model, tp))]

    of_encoder, of_decoder = block_costs(model)
    return [
        words,
        positions,
        *stack("encoder", model.num_layers, of_encoder, "full", cross=False),
        replace(words, forward=_enter_decoder, with_next_block=True),
        replace(positions, with_next_block=True),
        *stack("decoder", model.decoder_num_layers, of_decoder, "causal", cross=True),
        head,
    ]


def block_costs(model: ModelConfig) -> tuple[int, int]:
    """Multiplications of a sample in a block of the encoder, and of the decoder."""
    attention, mlp = model.attention, model.mlp
    encoded = model.seq_length
    decoded = encoded if model.decoder_seq_length is None else model.decoder_seq_length
    query = attention.num_attention_heads * attention.kv_channels
    kv = attention.num_query_groups * attention.kv_channels
    queries, keys = 2 * model.hidden_size * query, 2 * model.hidden_size * kv
    inner = (3 if mlp.gated else 2) * model.hidden_size * mlp.ffn_hidden_size
    encoder = encoded * (queries + keys + inner) + 2 * query * encoded**2
    own = decoded * (queries + keys + inner) + query * decoded**2
    cross = decoded * queries + encoded * keys + 2 * query * decoded * encoded
    return encoder, own + cross
