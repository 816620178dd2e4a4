"""Flags for RETRO: the retriever in the model, and the samples' neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron.config.features import KindConfig, ModelPart
from megatron.config.flags import FRACTION, POSITIVE, ConfigError, ConfigResolver, option


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(ModelPart):
    """Retrieval: the neighbours that a model reads, and the layers that attend to them.

    ``retro_cross_attention_layers`` is empty without a retriever.
    """

    retro_add_retriever: bool = option(False, role="weights", megatron=True)
    """Attend to the text of retrieved neighbours. Without it the model is a GPT."""
    retro_num_neighbors: int = option(2, bounds=POSITIVE, role="results", megatron=True)
    """Number of neighbours that the model reads for each chunk."""
    retro_num_retrieved_chunks: int = option(2, bounds=POSITIVE, role="results", megatron=True)
    """Number of consecutive chunks that the model reads for each neighbour, including itself."""
    retro_gpt_chunk_length: int = option(
        64, bounds=POSITIVE, role="results", aliases=("--retro-chunk-length",), megatron=True
    )
    """Number of tokens per chunk. If --retro-project-dir is given, the project determines it."""
    retro_encoder_layers: int = option(2, bounds=POSITIVE, role="weights", megatron=True)
    """Number of layers of the encoder that reads the neighbours."""
    retro_encoder_hidden_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability after attention and MLP in the encoder."""
    retro_encoder_attention_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability for the attention weights in the encoder."""
    retro_attention_gate: float = option(1.0, role="results", megatron=True)
    """Factor applied to the output of the attention to neighbours. With a small value such as 0.01,
    a trained GPT is almost unchanged at the start."""
    retro_cross_attention_layers: tuple[int, ...] = option(
        (),
        derived="every third layer, from 6 on, or from 9 with more than 15; with fewer than 6 from "
        "num-layers // 2 + 1",
        role="weights",
    )
    """Layers that attend to the neighbours, counted from 1."""

    families: ClassVar[frozenset[str]] = frozenset({"retro"})

    @property
    def idle(self) -> bool:
        return not self.retro_add_retriever

    @property
    def retrieved_length(self) -> int:
        """Number of tokens in a neighbour, including its continuation."""
        return self.retro_num_retrieved_chunks * self.retro_gpt_chunk_length

    @property
    def chunk_neighbors_length(self) -> int:
        """Total number of tokens in all neighbours of a chunk."""
        return self.retro_num_neighbors * self.retrieved_length

    def check_lengths(self, lengths: Sequence[int], source: str) -> None:
        chunk_length = self.retro_gpt_chunk_length
        for length in lengths:
            if self.retro_add_retriever and length % chunk_length:
                raise ConfigError(
                    f"{source} has sequences of {length} tokens, which are no whole chunks of "
                    f"--retro-gpt-chunk-length {chunk_length}: make difficulty_step and all "
                    f"difficulties multiples of {chunk_length}"
                )

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> RetrievalConfig:
        if not self.retro_add_retriever:
            return replace(self, retro_cross_attention_layers=())
        chosen = self.retro_cross_attention_layers
        if not chosen:
            chosen = resolver.put(
                "retro_cross_attention_layers",
                tuple(range(first_layer(layers), layers + 1, 3)),
                f"every third layer from {first_layer(layers)} of {layers}",
            )
        resolver.check(
            list(chosen) == sorted(set(chosen)) and chosen[0] >= 1 and chosen[-1] <= layers,
            f"{resolver.show('retro_cross_attention_layers')}: expected ascending numbers of "
            f"layers, from 1 to {layers}",
        )
        resolver.check(
            seq_length % self.retro_gpt_chunk_length == 0,
            f"{resolver.show('retro_gpt_chunk_length')} must divide {resolver.show('seq_length')}",
        )
        retrieved = self.retro_num_retrieved_chunks * self.retro_gpt_chunk_length
        resolver.check(
            longest is None or retrieved <= longest,
            f"{resolver.show('retro_num_retrieved_chunks')} of "
            f"{resolver.show('retro_gpt_chunk_length')} tokens are more than "
            f"--max-position-embeddings {longest}: neighbours have the positions of the text; give "
            f"--max-position-embeddings {retrieved} or more",
        )
        return replace(self, retro_cross_attention_layers=chosen)


def first_layer(layers: int) -> int:
    """Return the first layer that attends to neighbours, counted from 1, as in Megatron. With fewer
    than 6 layers, where Megatron has none, this is the first layer of the model's upper half."""
    if layers < 6:
        return layers // 2 + 1
    return 6 if layers <= 15 else 9


@dataclass(frozen=True)
class RetroDataConfig(KindConfig):
    """RETRO: where the samples' neighbours are, and how samples are read."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Project folder written by tools/retro/preprocess_data.py, with the database and the
    neighbours. Its config.json determines the run's data, tokenizer, sequence length, seed, batch
    size, number of samples and evaluations."""
    dataloader_type: str = option("single", choices=("single", "cyclic"))
    """single: read samples in one pass, in Megatron's order. cyclic: read the samples that have
    neighbours in the same order, but repeatedly, for --retro-cyclic-train-iters."""
    retro_cyclic_train_iters: int | None = option(None, bounds=POSITIVE)
    """Number of training iterations with --dataloader-type cyclic. By default, the run reads all
    samples of the project once."""
    retro_verify_neighbor_count: bool = option(True, off="--retro-no-verify-neighbor-count")
    """Train even if the number of samples differs from the number with neighbours. For samples
    without neighbours, the model reads end-of-document tokens instead."""
    retro_return_doc_ids: bool = option(False)
    """Include in each batch the indices of the documents that its samples are from."""

    idle: ClassVar[str] = (
        "only a model with --retro-add-retriever (pretrain_retro.py) reads neighbours"
    )
