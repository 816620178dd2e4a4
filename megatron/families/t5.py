"""T5: the samples that it is trained on."""

from __future__ import annotations

from megatron.config import ConfigError, ModelConfig, ParallelConfig, RunConfig
from megatron.data.masked.data import T5Data
from megatron.families.family import Family
from megatron.model.spec import ModelSpec
from megatron.tokenizer import Tokenizer


class T5(Family):
    """See :class:`Family`."""

    name = "t5"

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        """See :meth:`Family.spec`.

        Raises:
            ConfigError: there are samples of a T5, for the tools that show and index them, and no
                layers.
        """
        raise ConfigError("the family t5 has samples and no layer list: it cannot be trained")

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> T5Data:
        """See :meth:`Family.data`."""
        return T5Data(config, tokenizer)


FAMILY = T5()
