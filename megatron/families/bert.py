"""BERT: the samples that it is trained on."""

from __future__ import annotations

from megatron.config import ConfigError, ModelConfig, ParallelConfig, RunConfig
from megatron.data.masked.data import BertData
from megatron.families.family import Family
from megatron.model.spec import ModelSpec
from megatron.tokenizer import Tokenizer


class BERT(Family):
    """See :class:`Family`."""

    name = "bert"

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        """See :meth:`Family.spec`.

        Raises:
            ConfigError: there are samples of a BERT, for the tools that show and index them, and no
                layers.
        """
        raise ConfigError("the family bert has samples and no layer list: it cannot be trained")

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> BertData:
        """See :meth:`Family.data`."""
        return BertData(config, tokenizer)


FAMILY = BERT()
