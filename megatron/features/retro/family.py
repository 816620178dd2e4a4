"""RETRO model family: a GPT that attends to the text of retrieved neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from megatron.config import ModelConfig, ParallelConfig, RunConfig, Settings
from megatron.data.texts import ScoredText
from megatron.families import gpt
from megatron.families.family import BlockLengths, GenerationSpec
from megatron.families.gpt import GPT, GPTData
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.layers import ADDED_PARTS, encoder_travels, retro_layers
from megatron.features.retro.neighbors import NeighborSpec
from megatron.features.retro.project import retro_settings
from megatron.features.retro.samples import RetroBatch, RetroData
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerCache, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.tokenizer import Tokenizer


def begin(model: ModelConfig, batch: RetroBatch) -> LayerState:
    """Return a micro batch's initial state, which has only its text. Later layers add
    neighbours."""
    return gpt.begin(model, batch.text).changed(batch=batch)


def travels(
    model: ModelConfig, state: LayerState, tp: TensorParallel, index: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors sent across a pipeline stage boundary. These are the hidden
    states [B, S / slices, H] and, between the block that encodes the neighbours and the last block
    that attends to them, the encoder's output [B, L x K x R / slices, H]."""

    def shape(samples: int, length: int) -> tuple[int, ...]:
        assert length % tp.slices == 0
        return samples, length // tp.slices, model.hidden_size

    shapes = {"hidden": shape(*state.hidden.shape)}
    samples, retrieved = state.batch.neighbors_BLKR.flatten(1).shape
    if retrieved and encoder_travels(model, index):
        shapes["encoder"] = shape(samples, retrieved)
    return shapes


class Retrieved(NamedTuple):
    """Minimal batch for generation, with only the neighbours' tokens, [1, C, K, R]."""

    neighbors_BLKR: Tensor


def _continue(tokens_1S: Tensor, positions_1S: Tensor, cache: LayerCache) -> LayerState:
    none = tokens_1S.new_empty(1, 0, 0, 0)
    batch = Retrieved(none if cache.neighbors is None else cache.neighbors.neighbors_BLKR)
    return LayerState(tokens_1S, position_ids=positions_1S, cache=cache, batch=batch)


def _block_flops(
    model: ModelConfig, own: int, keys: int, other: int = 0, other_keys: int = 0
) -> tuple[float, float]:
    """Return the forward FLOPs of one block for a sample: (linear layers, attention scores and
    weighted sum of values). The sample has ``own`` tokens, each of which attends to ``keys`` of
    them. With cross-attention, each also attends to ``other_keys`` of ``other`` encoded tokens."""
    attention, hidden = model.attention, model.hidden_size
    query = attention.num_attention_heads * attention.kv_channels
    kv = attention.num_query_groups * attention.kv_channels
    mlp = (3 if model.mlp.gated else 2) * model.mlp.ffn_hidden_size
    linear = 2 * hidden * own * (attention.query_rows + query + 2 * kv + mlp)
    if other:
        linear += 2 * hidden * (own * 2 * query + other * 2 * kv)
    return float(linear), 4.0 * query * own * (keys + other_keys)


_RETRIEVAL = {field.name for field in dataclasses.fields(RetrievalConfig)}


class Retro(GPT):
    name = "retro"
    starts_from = frozenset({"gpt"})
    # A project stores the neighbours by sample index, so epochs cannot change the samples.
    unused_flags = GPT.unused_flags - _RETRIEVAL | {"train_data_exact_num_epochs"}
    scoring_note = (
        "a Retro reads these texts without neighbours, its attention to them left out; "
        "tools/retro/evaluate.py measures it with those of its project"
    )

    def complete_settings(self, settings: Settings) -> Settings:
        return retro_settings(super().complete_settings(settings))

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        costs = [linear + scores for linear, scores in self._blocks_flops(model)]
        layers = partial(retro_layers, model, parallel, costs)
        crossing = partial(travels, model)
        return ModelSpec(layers, partial(begin, model), crossing, added_parts=ADDED_PARTS)

    def shape(self, model: ModelConfig, run: RunConfig | None = None) -> TransformerShape:
        linear, scores = map(sum, zip(*self._blocks_flops(model), strict=True))
        of_gpt = _block_flops(model, model.seq_length, model.seq_length)
        within = linear - model.num_layers * of_gpt[0], scores - model.num_layers * of_gpt[1]
        return dataclasses.replace(super().shape(model, run), within=within)

    def block_lengths(self, model: ModelConfig) -> tuple[BlockLengths, ...]:
        retrieval, sample = model.part(RetrievalConfig), model.seq_length
        chunk, of_chunk = retrieval.retro_gpt_chunk_length, retrieval.chunk_neighbors_length
        retrieved, neighbor = sample // chunk * of_chunk, retrieval.retrieved_length
        encoder = [BlockLengths(retrieved, seen=neighbor)] * retrieval.retro_encoder_layers
        encoder[0] = BlockLengths(retrieved, sample, neighbor, chunk)
        blocks = [BlockLengths(sample)] * model.num_layers
        attending = retrieval.retro_cross_attention_layers
        for number in attending:
            inside = tuple(encoder) if number == attending[0] else ()
            blocks[number - 1] = BlockLengths(sample, retrieved, 0, of_chunk, inside)
        return tuple(blocks)

    def _blocks_flops(self, model: ModelConfig) -> list[tuple[float, float]]:
        """Return the forward FLOPs of each block for a sample, as returned by ``_block_flops``. The
        encoder's are added to the block that contains it."""
        blocks = []
        for block in self.block_lengths(model):
            flops = [
                _block_flops(model, each.own, each.keys, each.other, each.other_keys)
                for each in block.whole
            ]
            blocks.append((sum(linear for linear, _ in flops), sum(scores for _, scores in flops)))
        return blocks

    def generation(self, config: RunConfig, tokenizer: Tokenizer | None) -> GenerationSpec:
        model, retrieval = config.model, config.model.part(RetrievalConfig)
        neighbors = NeighborSpec(
            retrieval.retro_gpt_chunk_length,
            retrieval.retro_num_neighbors,
            retrieval.retrieved_length,
            tuple(number - 1 for number in retrieval.retro_cross_attention_layers),
            partial(encoder_travels, model),
        )
        longest = model.positions.max_position_embeddings
        return GenerationSpec(_continue, longest, neighbors=neighbors)

    def scored_batch(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        texts: Sequence[ScoredText],
        pad_to: int | None = None,
    ) -> Any:
        return RetroBatch.alone(super().scored_batch(config, tokenizer, texts, pad_to))

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> RetroData:
        return RetroData(GPTData(config, tokenizer))


FAMILY = Retro()
