"""GPT: a causal decoder that continues text, trained to predict the next token."""

from __future__ import annotations

from functools import partial

from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.data.batch import GPTBatch
from megatron.data.gpt_data import GPTData
from megatron.families.family import Family
from megatron.model.attention_masks import AttentionMasks
from megatron.model.gpt import gpt_layers
from megatron.model.spec import ModelSpec, hidden_travels
from megatron.model.state import LayerState
from megatron.parallel.cross_entropy import Targets
from megatron.tokenizer import Tokenizer


def begin(batch: GPTBatch) -> LayerState:
    """The state that the layers start with."""
    return LayerState(
        hidden=batch.tokens_BS,
        position_ids=batch.position_ids_BS,
        masks=AttentionMasks(batch.document_ids_BS),
        targets=Targets(batch.labels_BS, batch.loss_mask_BS),
    )


class GPT(Family):
    """See :class:`Family`."""

    name = "gpt"
    generates = True

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        """See :meth:`Family.spec`."""
        layers = partial(gpt_layers, model, parallel)
        return ModelSpec(layers, begin, partial(hidden_travels, model.hidden_size))

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> GPTData:
        """See :meth:`Family.data`."""
        return GPTData(config, tokenizer)


FAMILY = GPT()
