"""What a family of models says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.data.pipeline import DataPipeline
from megatron.model.flops import TransformerShape
from megatron.model.spec import ModelSpec
from megatron.tokenizer import Tokenizer


class Family(ABC):
    """The only way to a model: everything that is not the same for all of them.

    Attributes:
        name: as checkpoints and entry points call it.
        generates: whether it continues text, token by token.
    """

    name: ClassVar[str]
    generates: ClassVar[bool] = False

    @abstractmethod
    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        """The layer list, what a micro batch gives it, and its losses.

        Args:
            model: shape of the network, with the vocabulary sizes filled in.
            parallel: what is recomputed in the backward pass, and how large logits may become.
        """

    @abstractmethod
    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DataPipeline:
        """The samples and batches of a run.

        Raises:
            ValueError: flags contradict each other or the tokenizer.
        """

    def shape(self, model: ModelConfig) -> TransformerShape:
        """The numbers that the model FLOPs of a sample depend on."""
        return TransformerShape.of(model)
