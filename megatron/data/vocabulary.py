"""Finds token ids that the model has no row for, before training instead of by an index error."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset, bin_path

logger = logging.getLogger(__name__)


def check_vocabulary(indexed: IndexedDataset, vocab_size: int, cache: IndexCache) -> None:
    """Check that all token ids are below `vocab_size`.

    Reads the whole .bin once; the result is cached under the file's size, date and lengths.

    Raises:
        ValueError: naming the file, the sequence, the id and the vocabulary size.
    """
    path = bin_path(indexed.prefix)
    if indexed.dtype.kind not in "iu":
        raise ValueError(f"{path} holds {indexed.dtype.name} values, not token ids")
    limits = np.iinfo(indexed.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return  # every value the dtype can hold is in the vocabulary
    stat = path.stat()
    depends_on = {
        "bytes": stat.st_size,
        "modified": stat.st_mtime_ns,
        "dtype": indexed.dtype.name,
        "sequence lengths": indexed.lengths_digest,
    }
    extremes = cache.arrays("token-range", depends_on, lambda: _extremes(indexed))
    for token, position in extremes["tokens_and_positions"].tolist():
        if not 0 <= token < vocab_size:
            byte = position * indexed.dtype.itemsize
            sequence = int(np.searchsorted(indexed.sequence_offsets, byte, side="right")) - 1
            raise ValueError(
                f"{path}: sequence {sequence} holds the token id {token}, but the vocabulary has "
                f"{vocab_size} ids (0 to {vocab_size - 1}). The file was preprocessed with another "
                "tokenizer: compare --tokenizer-type, --vocab-file, --tokenizer-model and "
                "--vocab-size with those of the preprocessing"
            )


def _extremes(indexed: IndexedDataset) -> Mapping[str, np.ndarray]:
    """Smallest and largest token id, each with its position in the .bin: int64[2, 2]."""
    logger.info("checking the token ids of %s, once", bin_path(indexed.prefix))
    smallest, largest = [0, 0], [0, 0]
    for start, tokens in indexed.token_blocks():
        low, high = int(tokens.argmin()), int(tokens.argmax())
        smallest = min(smallest, [int(tokens[low]), start + low])
        if tokens[high] > largest[0]:
            largest = [int(tokens[high]), start + high]
    return {"tokens_and_positions": np.array([smallest, largest], np.int64)}
