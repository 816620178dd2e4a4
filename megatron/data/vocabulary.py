"""Finds token ids that the model has no row for, before training instead of by an index error."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.indexed.checking import Extremes, check_ids
from megatron.data.remote import RemoteDataset

logger = logging.getLogger(__name__)


def check_vocabulary(indexed: IndexedDataset, vocab_size: int, cache: IndexCache) -> None:
    """Check that all token ids are below `vocab_size`.

    Reads the whole .bin once; the result is cached under the file's size, date and lengths. A
    remote file is checked as it is read.

    Raises:
        ValueError: naming the file, the sequence, the id and the vocabulary size.
    """
    if indexed.dtype.kind not in "iu":
        raise ValueError(f"{indexed.prefix}.bin holds {indexed.dtype.name} values, not token ids")
    limits = np.iinfo(indexed.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return  # every value the dtype can hold is in the vocabulary
    if isinstance(indexed, RemoteDataset):
        indexed.limit_ids(vocab_size)
        return
    depends_on = {
        **indexed.bin_identity(),
        "dtype": indexed.dtype.name,
        "sequence lengths": indexed.lengths_digest,
    }
    layout = {"tokens_and_positions": (np.dtype(np.int64), (2, 2))}
    extremes = cache.arrays("token-range", depends_on, lambda: _extremes(indexed), layout)
    check_ids(indexed, extremes["tokens_and_positions"], vocab_size)


def _extremes(indexed: IndexedDataset) -> Mapping[str, np.ndarray]:
    """Smallest and largest token id, each with its position in the .bin: int64[2, 2]."""
    logger.info("checking the token ids of %s.bin, once", indexed.prefix)
    extremes = Extremes()
    for start, tokens in indexed.token_blocks():
        extremes.add(start, tokens)
    return {"tokens_and_positions": extremes.array()}
