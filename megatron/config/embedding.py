"""The first and the last layer: token embedding and head."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import POSITIVE, option


@dataclass(frozen=True)
class Vocabulary:
    """Sizes of a token embedding.

    Attributes:
        size: tokens; 0 as long as there is no tokenizer.
        padded: rows of the embedding, of which all ranks hold equal shares.
    """

    size: int = 0
    padded: int = 0


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Embedding and head."""

    untie_embeddings_and_output_weights: bool = option(False, role="weights", megatron=True)
    """Give the output head weights of its own instead of the token embedding's."""
    scale_embeddings: bool = option(False, role="results")
    """Multiply the embeddings by the square root of hidden-size."""
    final_logit_softcapping: float | None = option(None, bounds=POSITIVE, role="results")
    """Bend the logits x to c * tanh(x / c), with this c."""
    make_vocab_size_divisible_by: int = option(128, bounds=POSITIVE, megatron=True)
    """The token table is padded to a multiple of this times the tensor-parallel size."""

    @property
    def tied(self) -> bool:
        """Whether the head uses the token embedding's weights."""
        return not self.untie_embeddings_and_output_weights

    def vocabulary(self, size: int, tensor_size: int = 1) -> Vocabulary:
        """The embedding of so many tokens, cut over so many tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor_size
        return Vocabulary(size, -(-size // multiple) * multiple)
