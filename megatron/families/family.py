"""Interface of a family of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.data.pipeline import DataPipeline
from megatron.model.flops import TransformerShape
from megatron.model.spec import ModelSpec
from megatron.tokenizer import Tokenizer


class Family(ABC):
    """Everything that differs between families; the rest of the project names none of them."""

    name: ClassVar[str]
    """As in checkpoints and entry points."""
    generates: ClassVar[bool] = False
    """Whether its models generate text, token by token."""
    tokenizer_type: ClassVar[str] = "BertWordPieceLowerCase"
    """The tokenizer of vocabulary files that are given without ``--tokenizer-type``."""
    unused: ClassVar[frozenset[str]] = frozenset()
    """Fields of flags that its models and samples do not depend on, though those of other families
    do; a run refuses them."""

    @abstractmethod
    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        """Layer list, inputs and losses of a model with the vocabulary sizes filled in."""

    @abstractmethod
    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DataPipeline:
        """The samples and batches of a run. Raises ValueError if flags contradict each other or the
        tokenizer."""

    def shape(self, model: ModelConfig) -> TransformerShape:
        """The numbers that the model FLOPs of a sample depend on."""
        return TransformerShape.of(model)
