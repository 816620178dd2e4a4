"""Flags of retrieval: what the network reads, and the neighbours of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron.config.features import KindConfig, ModelPart
from megatron.config.flags import FRACTION, POSITIVE, ConfigError, ConfigResolver, option


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(ModelPart):
    """Retrieval: what a network reads of its neighbours, in which layers.

    Without a retriever ``retro_cross_attention_layers`` is empty.
    """

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
        """Tokens of a neighbour with its continuation."""
        return self.retro_num_retrieved_chunks * self.retro_gpt_chunk_length

    @property
    def chunk_neighbors_length(self) -> int:
        """Tokens of all neighbours of a chunk together."""
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
    """The first layer that attends to the neighbours, counted from 1, as in Megatron; which has
    none with fewer than 6 layers, where this is the first of the upper half."""
    if layers < 6:
        return layers // 2 + 1
    return 6 if layers <= 15 else 9


@dataclass(frozen=True)
class RetroDataConfig(KindConfig):
    """Retro: the neighbours of the samples."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Folder of tools/retro/preprocess_data.py: database and neighbours. Its config.json says the
    run's data, tokenizer, sequence length, seed, batch size, number of samples and evaluations."""
    dataloader_type: str = option("single", choices=("single", "cyclic"))
    """single: samples are read in one pass, in Megatron's order. cyclic: those that have neighbours
    are read again, in the same order, for --retro-cyclic-train-iters."""
    retro_cyclic_train_iters: int | None = option(None, bounds=POSITIVE)
    """Iterations to train with --dataloader-type cyclic, instead of the project's number of
    samples."""
    retro_verify_neighbor_count: bool = option(True, off="--retro-no-verify-neighbor-count")
    """Train although the number of samples is not the one that has neighbours; those without
    neighbours read end-of-document tokens."""
    retro_return_doc_ids: bool = option(False)
    """Batches say the documents that their samples are from."""

    idle: ClassVar[str] = (
        "only a model with --retro-add-retriever (pretrain_retro.py) reads neighbours"
    )
