"""Retro: a GPT that reads the text of retrieved neighbours."""

from __future__ import annotations

from functools import partial

from megatron.config import ModelConfig, ParallelConfig, RunConfig, Setting, Settings
from megatron.data.kinds.retro.batch import RetroBatch
from megatron.families import gpt
from megatron.families.gpt import GPT, GPTData
from megatron.model.layer_list import LayerState
from megatron.model.retro import encoder_travels, retro_layers
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
    generates = False
    heads = frozenset({"lm"})

    def complete_settings(self, settings: Settings) -> Settings:
        found = {"retro_add_retriever": Setting(True, f"family {self.name}")}
        return super().complete_settings(settings) | found

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        layers = partial(retro_layers, model, parallel)
        return ModelSpec(layers, partial(begin, model), partial(travels, model))

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> GPTData:
        return GPTData(config, tokenizer)


FAMILY = Retro()
