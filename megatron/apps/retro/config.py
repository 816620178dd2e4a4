"""Flags of a project's stages: project, GPT data, embedder, index and neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, Bounds, option

EMBEDDERS = ("megatron", "huggingface", "hashing")
MODEL_FILES = ("bert_load", "retro_bert_vocab_file")
"""Fields that contain paths of model files. The files may have moved since the project was created:
the embedder's identity shows whether their content is still the same."""
INDEX_TYPES = ("faiss-par-add", "faiss-base")
_FRACTION_LOADED = Bounds(lambda value: 0 < value <= 1, "must be in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class EmbedderFlags:
    """Embedder: maps chunks of text to embeddings, whose distances determine neighbours."""

    bert_embedder_type: str | None = option(
        None,
        choices=EMBEDDERS,
        role="results",
        derived="megatron where --bert-load or --load names a model, else hashing",
    )
    """Type of the embedder. megatron: a BERT of this project, in Megatron's or DeepSpeed's format;
    huggingface: a folder with an encoder of transformers or sentence-transformers; hashing: hashed
    words and word pairs, without a model."""
    bert_load: str | None = option(None, derived="--load", role="results")
    """Checkpoint or folder of the embedding model."""
    retro_bert_vocab_file: str | None = option(
        None, derived="--vocab-file, or the model's own", role="results"
    )
    """Vocabulary file (vocab.txt) of the BERT that embeds chunks."""
    retro_bert_tokenizer_type: str | None = option(
        None, derived="--tokenizer-type, or the model's own", role="results"
    )
    """Tokenizer of the BERT that embeds chunks: BertWordPieceLowerCase or BertWordPieceCase."""
    retro_bert_batch_size: int = option(128, bounds=POSITIVE)
    """Batch size of the embedder, in chunks. Chunks of similar length share a batch."""
    retro_bert_max_chunk_length: int = option(256, bounds=POSITIVE, role="results")
    """Maximum number of tokens of a chunk that the embedder reads, special tokens included. The
    model's number of positions also limits it."""
    output_bert_embeddings: bool = option(False, note="an embedder computes nothing but embeddings")
    retro_hashing_width: int = option(256, bounds=POSITIVE, role="results")
    """Width of the embeddings with --bert-embedder-type hashing."""


@dataclass(frozen=True, kw_only=True)
class IndexFlags:
    """Index: finds the nearest embeddings in the database."""

    retro_index_type: str | None = option(None, derived=INDEX_TYPES[0], choices=INDEX_TYPES)
    """Form in which the processes of index-add write their results: as codes of the index
    (faiss-par-add), or as embeddings that one process then encodes (faiss-base). Both give the same
    index."""
    retro_index_str: str | None = option(
        None,
        derived="Flat up to 100,000 chunks, clusters above, clusters and codes above 10 million",
    )
    """Index in faiss's notation: Flat (exact, works without faiss), IVF4096,Flat,
    IVF65536_HNSW32,Flat, OPQ32_256,IVF4194304_HNSW32,PQ32 and similar ones."""
    retro_index_ntrain: int | None = option(
        None,
        derived="64 chunks for each cluster, and at least 65,536",
        bounds=POSITIVE,
        aliases=("--retro-nchunks-sampled",),
    )
    """Number of chunks on which the index's clusters and codes are trained."""
    retro_index_train_load_fraction: float | None = option(
        None, derived="1.0", bounds=_FRACTION_LOADED
    )
    """Fraction of these training chunks to actually use."""
    retro_index_add_load_fraction: float | None = option(
        None, derived="1.0", bounds=_FRACTION_LOADED
    )
    """Fraction of the database's chunks to add to the index, starting with the first."""
    retro_index_delete_training_embeddings: bool = option(
        True,
        off="--retro-index-no-delete-training-embeddings "
        "--no-retro-index-delete-training-embeddings",
    )
    """Keep the embeddings that the index was trained on, instead of deleting them."""
    retro_index_delete_added_codes: bool = option(
        True,
        off="--retro-index-no-delete-added-codes --no-retro-index-delete-added-codes",
    )
    """Keep the codes or embeddings that were added to the index, instead of deleting them."""
    retro_index_recall_queries: int = option(1000, bounds=NOT_NEGATIVE)
    """Number of chunks for which the neighbours found by the index are compared with the exact ones
    after index-add. 0 disables the comparison."""
    retro_query_nprobe: int | None = option(
        None,
        derived="a 64th of the clusters, and at least 128",
        bounds=POSITIVE,
        aliases=("--retro-nprobe",),
    )
    """Number of clusters to search for each query. More clusters find more of the exact neighbours,
    but take longer."""
    retro_query_ef_search: int = option(256, bounds=POSITIVE, aliases=("--retro-ef-search",))
    """Number of clusters that an index with HNSW visits in its graph to find the nearest."""


@dataclass(frozen=True, kw_only=True)
class RetroPreprocessConfig(EmbedderFlags, IndexFlags):
    """Retro: project, tasks, GPT data, embedder, index, neighbours."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Project folder, which the stages write and training reads."""
    retro_tasks: str = option("build")
    """Tasks to run, separated by commas: db-build, index-train, index-add, query-neighbors;
    index-build for both index stages, or build for all."""
    retro_task_validate: float | None = option(None, bounds=SHARE)
    """Fraction of the finished blocks that the tasks recompute and compare bit for bit, instead of
    computing missing blocks."""
    retro_block_size: int = option(100_000, bounds=POSITIVE, role="results")
    """Number of chunks per file of embeddings, codes or neighbours."""
    retro_doc_block_size: int = option(100_000, bounds=POSITIVE, role="results")
    """Number of documents per file of chunks."""

    retro_gpt_chunk_length: int = option(
        64, bounds=POSITIVE, aliases=("--retro-chunk-length",), role="results"
    )
    """Chunk length in tokens."""
    retro_gpt_seq_length: int | None = option(None, derived="seq-length", bounds=POSITIVE)
    """Sequence length of the GPT's samples, in tokens."""
    retro_gpt_seed: int | None = option(None, derived="seed", bounds=NOT_NEGATIVE)
    """Seed that determines the order of the GPT's samples."""
    retro_gpt_data_path: tuple[str, ...] = option((), derived="data-path")
    """Data of the GPT. Other flags that select training data can be used instead."""
    retro_gpt_split: str | None = option(None, derived="split")
    """Proportions of training, validation and test data."""
    retro_gpt_train_samples: int | None = option(None, derived="train-samples", bounds=POSITIVE)
    """Number of training samples that get neighbours."""
    retro_gpt_eval_interval: int | None = option(None, derived="eval-interval", bounds=POSITIVE)
    """Steps between evaluations, which determine how many validation samples get neighbours."""
    retro_gpt_eval_iters: int | None = option(None, derived="eval-iters", bounds=NOT_NEGATIVE)
    """Number of batches per evaluation."""
    retro_gpt_global_batch_size: int | None = option(
        None, derived="global-batch-size", bounds=POSITIVE
    )
    """Number of samples per training step."""
    retro_gpt_tokenizer_type: str | None = option(None, derived="tokenizer-type")
    """Tokenizer of the GPT's data. If any tokenizer flag with gpt in its name is given, the
    tokenizer flags without gpt apply to the embedder."""
    retro_gpt_tokenizer_model: str | None = option(None, derived="tokenizer-model")
    """Folder or model file of the GPT's tokenizer."""
    retro_gpt_vocab_file: str | None = option(None, derived="vocab-file")
    """Vocabulary file of the GPT's tokenizer."""
    retro_gpt_merge_file: str | None = option(None, derived="merge-file")
    """Merges file of the GPT's tokenizer."""

    retro_query_num_neighbors_query: int = option(200, bounds=POSITIVE)
    """Number of chunks to search for. Chunks of the sample's own documents are then removed."""
    retro_query_num_neighbors_save: int = option(20, bounds=POSITIVE)
    """Number of the remaining neighbours to keep."""

    retro_index_nfeats: int | None = option(None, note="the embedder says how wide vectors are")
    output_bert_embeddings: bool = option(False, note="a BERT that embeds chunks always does this")
    no_data_sharding: bool = option(False, note="processes share the work block by block")
