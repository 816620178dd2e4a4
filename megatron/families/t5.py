"""T5: the samples of its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.config import ConfigError, ModelConfig, ParallelConfig, RunConfig
from megatron.config.kinds.masked_data import MaskedDataConfig
from megatron.data.kinds.masked_data.masked_batch import T5Batch, T5Sample, collate_t5
from megatron.data.kinds.masked_data.t5 import T5Recipe
from megatron.data.pipeline import DataPipeline, SampleView
from megatron.families.family import Family
from megatron.model.spec import ModelSpec
from megatron.tokenizer import Tokenizer


class T5Data(DataPipeline):
    """The data of a T5's run."""

    flags = frozenset({"masked_data"})
    unit = "sentence"

    def recipe(self) -> T5Recipe:
        config = self.config.kind(MaskedDataConfig)
        return T5Recipe.from_config(config, self.tokenizer, self.seq_length, self.seed)

    def collator(self) -> Callable[[Sequence[T5Sample]], T5Batch]:
        return collate_t5

    def view(self, sample: T5Sample, length: int) -> SampleView:
        """See `DataPipeline.view`: the encoder's input, without a loss, and the text to predict.
        Tokens and loss mask are those of the decoder."""
        batch = self.collator()([sample])

        def text(tokens: Any, mask: Any) -> str:
            return self.tokenizer.detokenize(tokens[0][mask[0] > 0].tolist())

        encoder = text(batch.encoder_tokens_BE, batch.encoder_padding_mask_BE)
        labels = text(batch.labels_BD, batch.decoder_padding_mask_BD)
        return SampleView(
            batch.decoder_tokens_BD[0].numpy(),
            batch.loss_mask_BD[0].numpy(),
            f"[[{encoder}]]\n{labels}",
        )


class T5(Family):
    name = "t5"

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        # Tools show and index its samples.
        raise ConfigError("the family t5 has samples and no layer list: it cannot be trained")

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> T5Data:
        return T5Data(config, tokenizer)


FAMILY = T5()
