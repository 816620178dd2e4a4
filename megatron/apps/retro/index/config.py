"""The flags of the index of the database's vectors."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, Bounds, option

INDEX_TYPES = ("faiss-par-add", "faiss-base")
"""As :attr:`IndexFlags.retro_index_type` says."""
_FRACTION_LOADED = Bounds(lambda value: 0 < value <= 1, "must be in (0, 1]")


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
