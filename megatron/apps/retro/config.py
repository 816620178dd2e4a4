"""The flags of a project's stages: project, data of the GPT, embedder, index, neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, Bounds, option

EMBEDDERS = ("megatron", "huggingface", "hashing")
MODEL_FILES = ("bert_load", "retro_bert_vocab_file")
"""Fields that name files, which may have moved: an embedder's identity says whether they are still
the same."""
INDEX_TYPES = ("faiss-par-add", "faiss-base")
_FRACTION_LOADED = Bounds(lambda value: 0 < value <= 1, "must be in (0, 1]")


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


@dataclass(frozen=True, kw_only=True)
class IndexFlags:
    """Index: how the nearest of the database's vectors are found."""

    retro_index_type: str | None = option(None, derived=INDEX_TYPES[0], choices=INDEX_TYPES)
    """What the processes write for index-add: the codes of the index (faiss-par-add), or vectors
    that one process encodes (faiss-base). The indices are equal."""
    retro_index_str: str | None = option(
        None,
        derived="Flat up to 100,000 chunks, clusters above, clusters and codes above 10 million",
    )
    """Index in faiss's notation: Flat (exact, needs no faiss), IVF4096,Flat, IVF65536_HNSW32,Flat,
    OPQ32_256,IVF4194304_HNSW32,PQ32 and the like."""
    retro_index_ntrain: int | None = option(
        None,
        derived="64 chunks for each cluster, and at least 65,536",
        bounds=POSITIVE,
        aliases=("--retro-nchunks-sampled",),
    )
    """Chunks from which the index learns its clusters and codes."""
    retro_index_train_load_fraction: float | None = option(
        None, derived="1.0", bounds=_FRACTION_LOADED
    )
    """Share of these that it learns from."""
    retro_index_add_load_fraction: float | None = option(
        None, derived="1.0", bounds=_FRACTION_LOADED
    )
    """Share of the database's chunks that are added, the first ones."""
    retro_index_delete_training_embeddings: bool = option(
        True,
        off="--retro-index-no-delete-training-embeddings "
        "--no-retro-index-delete-training-embeddings",
    )
    """Keep the vectors from which the index learned."""
    retro_index_delete_added_codes: bool = option(
        True,
        off="--retro-index-no-delete-added-codes --no-retro-index-delete-added-codes",
    )
    """Keep the codes, or vectors, that were added to the index."""
    retro_index_recall_queries: int = option(1000, bounds=NOT_NEGATIVE)
    """Chunks whose neighbours in the index are compared with the exact ones after index-add; 0: no
    comparison."""
    retro_query_nprobe: int | None = option(
        None,
        derived="a 64th of the clusters, and at least 128",
        bounds=POSITIVE,
        aliases=("--retro-nprobe",),
    )
    """Clusters that a query is compared with; more find more, and take longer."""
    retro_query_ef_search: int = option(256, bounds=POSITIVE, aliases=("--retro-ef-search",))
    """Clusters that the graph of an index with HNSW visits to find the nearest ones."""


@dataclass(frozen=True, kw_only=True)
class RetroPreprocessConfig(EmbedderFlags, IndexFlags):
    """Retro: project, tasks, data of the GPT, embedder, index, neighbours."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Folder of the project, which the stages fill and training reads."""
    retro_tasks: str = option("build")
    """What to do, with commas between several: db-build, index-train, index-add (index-build is
    both), query-neighbors; build is all."""
    retro_task_validate: float | None = option(None, bounds=SHARE)
    """Compute this share of the finished blocks of the tasks again and compare them bit for bit,
    instead of computing missing ones."""
    retro_block_size: int = option(100_000, bounds=POSITIVE, role="results")
    """Chunks, or samples, of a file of embeddings, codes or neighbours."""
    retro_doc_block_size: int = option(100_000, bounds=POSITIVE, role="results")
    """Documents of a file of chunks."""

    retro_gpt_chunk_length: int = option(
        64, bounds=POSITIVE, aliases=("--retro-chunk-length",), role="results"
    )
    """Tokens of a chunk."""
    retro_gpt_seq_length: int | None = option(None, derived="seq-length", bounds=POSITIVE)
    """Tokens of a sample of the GPT."""
    retro_gpt_seed: int | None = option(None, derived="seed", bounds=NOT_NEGATIVE)
    """Seed of the order of the GPT's samples."""
    retro_gpt_data_path: tuple[str, ...] = option((), derived="data-path")
    """The GPT's data; any flag that names data for training does as well."""
    retro_gpt_split: str | None = option(None, derived="split")
    """Shares of training, validation and test."""
    retro_gpt_train_samples: int | None = option(None, derived="train-samples", bounds=POSITIVE)
    """Training samples that get neighbours."""
    retro_gpt_eval_interval: int | None = option(None, derived="eval-interval", bounds=POSITIVE)
    """Steps between evaluations, which says how many validation samples get neighbours."""
    retro_gpt_eval_iters: int | None = option(None, derived="eval-iters", bounds=NOT_NEGATIVE)
    """Batches of an evaluation."""
    retro_gpt_global_batch_size: int | None = option(
        None, derived="global-batch-size", bounds=POSITIVE
    )
    """Samples of a step."""
    retro_gpt_tokenizer_type: str | None = option(None, derived="tokenizer-type")
    """Tokenizer of the GPT's data. If one of these flags is given, those without gpt are the
    embedder's."""
    retro_gpt_tokenizer_model: str | None = option(None, derived="tokenizer-model")
    """Its folder or model file."""
    retro_gpt_vocab_file: str | None = option(None, derived="vocab-file")
    """Its vocabulary file."""
    retro_gpt_merge_file: str | None = option(None, derived="merge-file")
    """Its merges file."""

    retro_query_num_neighbors_query: int = option(200, bounds=POSITIVE)
    """Chunks that are searched for, from which those of the sample's own documents are taken
    out."""
    retro_query_num_neighbors_save: int = option(20, bounds=POSITIVE)
    """Of the others, how many are kept."""

    retro_index_nfeats: int | None = option(None, note="the embedder says how wide vectors are")
    output_bert_embeddings: bool = option(False, note="a BERT that embeds chunks always does this")
    no_data_sharding: bool = option(False, note="processes share the work block by block")
