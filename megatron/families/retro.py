"""Retro: a GPT that reads the text of retrieved neighbours."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron.config import ModelConfig, ParallelConfig, RunConfig, Setting, Settings
from megatron.data.kinds.retro.batch import RetroBatch
from megatron.families import gpt
from megatron.families.family import RETRIEVAL_FLAGS, BlockLengths
from megatron.families.gpt import GPT, GPTData
from megatron.model.flops import TransformerShape, block_flops
from megatron.model.layer_list import LayerState
from megatron.model.retro import (
    ADDED_PARTS,
    RetrievalLengths,
    blocks_flops,
    encoder_travels,
    retro_layers,
)
from megatron.model.spec import ModelSpec
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.tokenizer import Tokenizer


def begin(model: ModelConfig, batch: RetroBatch) -> LayerState:
    """The initial state of a micro batch: that of its text; the neighbours come in the middle."""
    return gpt.begin(model, batch.text).changed(batch=batch)


def travels(
    model: ModelConfig, state: LayerState, tp: TensorParallel, index: int
) -> dict[str, tuple[int, ...]]:
    """What crosses a stage boundary: hidden states [B, S / slices, H]; between the block that reads
    the neighbours and the last one that attends to them the encoder's output, too,
    [B, L x K x R / slices, H]."""

    def shape(samples: int, length: int) -> tuple[int, ...]:
        assert length % tp.slices == 0
        return samples, length // tp.slices, model.hidden_size

    found = {"hidden": shape(*state.hidden.shape)}
    samples, retrieved = state.batch.neighbors_BLKR.flatten(1).shape
    if retrieved and encoder_travels(model, index):
        found["encoder"] = shape(samples, retrieved)
    return found


class Retro(GPT):
    name = "retro"
    starts_from = frozenset({"gpt"})
    unused_flags = GPT.unused_flags - RETRIEVAL_FLAGS
    generates = False
    heads = frozenset({"lm"})

    def complete_settings(self, settings: Settings) -> Settings:
        found = {"retro_add_retriever": Setting(True, f"family {self.name}")}
        return super().complete_settings(settings) | found

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        layers = partial(retro_layers, model, parallel)
        crossing = partial(travels, model)
        return ModelSpec(layers, partial(begin, model), crossing, added_parts=ADDED_PARTS)

    def shape(self, model: ModelConfig, run: RunConfig | None = None) -> TransformerShape:
        plain = block_flops(model, model.seq_length, model.seq_length)
        linear, scores = (
            sum(found) - model.num_layers * of_plain
            for found, of_plain in zip(zip(*blocks_flops(model), strict=True), plain, strict=True)
        )
        return replace(super().shape(model, run), within=(linear, scores))

    def block_lengths(self, model: ModelConfig) -> tuple[BlockLengths, ...]:
        sample, retrieved, neighbor, of_chunk, chunk = RetrievalLengths.of(model)
        retrieval = model.retrieval
        attending = retrieval.retro_cross_attention_layers
        encoder = [BlockLengths(retrieved, seen=neighbor)] * retrieval.retro_encoder_layers
        encoder[0] = BlockLengths(retrieved, sample, neighbor, chunk)
        found = [BlockLengths(sample)] * model.num_layers
        for number in attending:
            inside = tuple(encoder) if number == attending[0] else ()
            found[number - 1] = BlockLengths(sample, retrieved, 0, of_chunk, inside)
        return tuple(found)

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> GPTData:
        return GPTData(config, tokenizer)


FAMILY = Retro()
