"""Retrieval in the network: the flags of Retro's layers, and what they resolve to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.config.flags import FRACTION, POSITIVE, ConfigResolver, option, shared


@dataclass(frozen=True, kw_only=True)
class _Retrieval:
    """Values that need no resolving."""

    retro_add_retriever: bool = option(False, role="weights", megatron=True)
    """Attend to the text of retrieved neighbours; without it the model is a GPT."""
    retro_num_neighbors: int = option(2, bounds=POSITIVE, role="results", megatron=True)
    """Neighbours that the model reads for each chunk."""
    retro_num_retrieved_chunks: int = option(2, bounds=POSITIVE, role="results", megatron=True)
    """Chunks of text that the model reads of each neighbour: itself and its continuation."""
    retro_gpt_chunk_length: int = option(
        64, bounds=POSITIVE, role="results", aliases=("--retro-chunk-length",), megatron=True
    )
    """Tokens of a chunk; --retro-project-dir says the length of its own."""
    retro_encoder_layers: int = option(2, bounds=POSITIVE, role="weights", megatron=True)
    """Layers of the encoder that reads the neighbours."""
    retro_encoder_hidden_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability of the encoder's outputs of attention and MLP."""
    retro_encoder_attention_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability of the encoder's attention weights."""
    retro_attention_gate: float = option(1.0, role="results", megatron=True)
    """Factor of what the attention to the neighbours adds; with a small one, as 0.01, a trained GPT
    begins almost as it was."""


@dataclass(frozen=True, kw_only=True)
class RetrievalFlags(_Retrieval):
    """Retrieval."""

    retro_cross_attention_layers: tuple[int, ...] = option(
        (),
        derived="every third layer, from 6 on, or from 9 with more than 15; with fewer than 6 from "
        "num-layers // 2 + 1",
        role="weights",
    )
    """Layers that attend to the neighbours, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(_Retrieval):
    """What a network retrieves, and which of its layers read it; ``retro_cross_attention_layers``
    is empty without a retriever."""

    retro_cross_attention_layers: tuple[int, ...]

    @property
    def retrieved_length(self) -> int:
        """Tokens of a neighbour with its continuation."""
        return self.retro_num_retrieved_chunks * self.retro_gpt_chunk_length

    def flags(self) -> dict[str, Any]:
        """The flags that give it, by field."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def resolve_retrieval(
    flags: RetrievalFlags,
    layers: int,
    seq_length: int,
    longest: int | None,
    resolver: ConfigResolver,
) -> RetrievalConfig:
    """Completes and checks the retrieval of a decoder with so many layers and tokens; ``longest``
    is the most positions that a sequence can have, None for any number."""
    values = shared(flags, _Retrieval)
    if not flags.retro_add_retriever:
        return RetrievalConfig(**values, retro_cross_attention_layers=())
    chosen = flags.retro_cross_attention_layers
    if not chosen:
        chosen = resolver.put(
            "retro_cross_attention_layers",
            tuple(range(first_layer(layers), layers + 1, 3)),
            f"every third layer from {first_layer(layers)} of {layers}",
        )
    resolver.check(
        list(chosen) == sorted(set(chosen)) and chosen[0] >= 1 and chosen[-1] <= layers,
        f"{resolver.show('retro_cross_attention_layers')}: expected ascending numbers of layers, "
        f"from 1 to {layers}",
    )
    resolver.check(
        seq_length % flags.retro_gpt_chunk_length == 0,
        f"{resolver.show('retro_gpt_chunk_length')} must divide {resolver.show('seq_length')}",
    )
    retrieved = flags.retro_num_retrieved_chunks * flags.retro_gpt_chunk_length
    resolver.check(
        longest is None or retrieved <= longest,
        f"{resolver.show('retro_num_retrieved_chunks')} of "
        f"{resolver.show('retro_gpt_chunk_length')} tokens are more than "
        f"--max-position-embeddings {longest}: neighbours have the positions of the text; give "
        f"--max-position-embeddings {retrieved} or more",
    )
    return RetrievalConfig(**values, retro_cross_attention_layers=chosen)


def first_layer(layers: int) -> int:
    """The first layer that attends to the neighbours, counted from 1, as in Megatron; which has
    none with fewer than 6 layers, where this is the first of the upper half."""
    if layers < 6:
        return layers // 2 + 1
    return 6 if layers <= 15 else 9
