"""The flags of what turns chunks of text into vectors."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import POSITIVE, option

EMBEDDERS = ("megatron", "huggingface", "hashing")
"""See :func:`megatron.apps.retro.embedding.build_embedder`."""

MODEL_FILES = ("bert_load", "retro_bert_vocab_file")
"""Fields that name files, which may have moved: an embedder's identity says whether they are still
the same."""


@dataclass(frozen=True, kw_only=True)
class EmbedderFlags:
    """Embedder: what turns chunks of text into vectors, whose distances make neighbours."""

    bert_embedder_type: str | None = option(
        None,
        choices=EMBEDDERS,
        role="results",
        derived="megatron where --bert-load or --load names a model, else hashing",
    )
    """megatron: a BERT of this project, Megatron's or DeepSpeed's format; huggingface: the folder
    of an encoder of transformers or of sentence-transformers; hashing: words and pairs of words
    hashed into a vector, without a model."""
    bert_load: str | None = option(None, derived="--load", role="results")
    """Checkpoint, or folder, of the model that embeds chunks."""
    retro_bert_vocab_file: str | None = option(
        None, derived="--vocab-file, or the model's own", role="results"
    )
    """vocab.txt of the BERT that embeds chunks."""
    retro_bert_tokenizer_type: str | None = option(
        None, derived="--tokenizer-type, or the model's own", role="results"
    )
    """BertWordPieceLowerCase or BertWordPieceCase, of the BERT that embeds chunks."""
    retro_bert_batch_size: int = option(128, bounds=POSITIVE)
    """Chunks that are embedded together; the longest of a block share a batch."""
    retro_bert_max_chunk_length: int = option(256, bounds=POSITIVE, role="results")
    """Tokens that are read of a chunk at most, special ones included; the model's positions, where
    they are fewer."""
    output_bert_embeddings: bool = option(False, note="an embedder computes nothing but embeddings")
    retro_hashing_width: int = option(256, bounds=POSITIVE, role="results")
    """Width of the vectors of --bert-embedder-type hashing."""
