"""TFRecords of BERT's samples, as google-research/bert's create_pretraining_data.py writes them.

A record is one sample, masked already: input_ids, input_mask and segment_ids of one length,
masked_lm_positions, masked_lm_ids and masked_lm_weights of another, and next_sentence_labels (0
next, 1 random).

Shape suffixes: S input ids of a record, P its predictions, padding included; R records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.kinds.masked_data.tfrecord import TFRecordFile, parse_example
from megatron.data.samples import Documents, Piece

logger = logging.getLogger(__name__)

# Part of every cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1
_INTEGERS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
_WEIGHTS = "masked_lm_weights"


class BertRecord(NamedTuple):
    """One record, checked and without its padding."""

    tokens_S: npt.NDArray[np.int64]
    types_S: npt.NDArray[np.int64]
    positions_P: npt.NDArray[np.int64]
    """Where something is to be predicted."""
    labels_P: npt.NDArray[np.int64]
    """What is to be predicted there."""
    is_random: int


def bert_record(features: Mapping[str, Any], where: str) -> BertRecord:
    """Checks the features of a record.

    Args:
        features: lists of values by name.
        where: names the record in messages.

    Raises:
        ValueError: a feature is missing, or has the wrong length or values.
    """
    missing = [name for name in (*_INTEGERS, _WEIGHTS) if name not in features]
    if missing:
        raise ValueError(
            f"{where} has no {', '.join(missing)} (it has "
            f"{', '.join(sorted(features)) or 'nothing'}): it is no pretraining sample of BERT's "
            "create_pretraining_data.py"
        )
    values = {name: np.array(features[name]) for name in (*_INTEGERS, _WEIGHTS)}
    for name, array in values.items():
        if array.dtype.kind != ("f" if name == _WEIGHTS else "i") and array.size:
            kind = "floats" if name == _WEIGHTS else "integers"
            raise ValueError(f"{where}: {name} are not {kind}")
    ids, mask, types, positions, labels, following = (values[name] for name in _INTEGERS)
    weights = values[_WEIGHTS]

    def check(good: bool | np.bool_, problem: str) -> None:
        if not good:
            raise ValueError(f"{where}: {problem}")

    check(len(ids) > 0, "there are no input_ids")
    check(
        len(ids) == len(mask) == len(types),
        f"{len(ids)} input_ids, {len(mask)} input_mask and {len(types)} segment_ids",
    )
    check(
        len(positions) == len(labels) == len(weights),
        f"{len(positions)} masked_lm_positions, {len(labels)} masked_lm_ids and {len(weights)} "
        "masked_lm_weights",
    )
    length = int(mask.sum())
    check(
        1 <= length <= len(ids) and bool((mask == (np.arange(len(ids)) < length)).all()),
        "input_mask is not 1 for each token and 0 behind",
    )
    check(((types == 0) | (types == 1)).all(), "segment_ids are not all 0 or 1")
    is_label = weights == 1
    check((is_label | (weights == 0)).all(), "masked_lm_weights are not all 0.0 or 1.0")
    check(
        len(following) == 1 and following[0] in (0, 1),
        f"next_sentence_labels are {following.tolist()}, not [0] or [1]",
    )
    positions, labels = positions[is_label], labels[is_label]
    check(
        ((positions >= 0) & (positions < length)).all() and len(set(positions)) == len(positions),
        f"masked_lm_positions are not all different and in its {length} tokens",
    )
    check(ids.min() >= 0 and (labels >= 0).all(), "there are negative token ids")
    return BertRecord(
        ids[:length].astype(np.int64),
        types[:length].astype(np.int64),
        positions.astype(np.int64),
        labels.astype(np.int64),
        int(following[0]),
    )


class TFRecords(Documents):
    """The records of one or more files, each a document of one sequence: its input ids.

    Opening reads and checks every record once; where each lies is cached.

    Args:
        path: a file, or a pattern such as data/part-*.tfrecord, in order of the names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a record is damaged or no sample of BERT; the message names file and record.
    """

    def __init__(self, path: str, cache: IndexCache) -> None:
        self.prefix = path
        names = sorted(glob(path)) if has_magic(path) and not Path(path).exists() else [path]
        if not names:
            raise FileNotFoundError(f"no file has a name like {path}")
        self._files = [TFRecordFile(name) for name in names]
        self._entries = [_scanned(file, cache) for file in self._files]
        counts = [len(entry["offsets"]) for entry in self._entries]
        self._first_records = np.cumsum([0, *counts])
        self.sequence_lengths = np.concatenate([entry["lengths"] for entry in self._entries])
        self.document_indices = np.arange(len(self.sequence_lengths) + 1)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def lengths_digest(self) -> str:
        """The number of records: all that an order of them depends on."""
        return f"{len(self)} records"

    def verify(self) -> None:
        """Nothing is left to check: every record was read when its file was opened first."""

    def record(self, index: int) -> BertRecord:
        """Record `index`, counted through all files.

        Raises:
            ValueError: the file has been damaged since it was checked.
        """
        file, record = self.place(index)
        offset = int(self._entries[file]["offsets"][record])
        return _read(self._files[file], offset, record)

    def place(self, index: int) -> tuple[int, int]:
        """The number of a record's file, and the record's number in it."""
        file = int(np.searchsorted(self._first_records, index, side="right")) - 1
        return file, index - int(self._first_records[file])

    def piece(self, index: int) -> Piece:
        """Where a record lies: its file, and its number there."""
        file, record = self.place(index)
        name = str(self._files[file].path)
        return Piece(name, record, 0, int(self.sequence_lengths[index]))

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """`length` input ids (default: the rest) of record `index`, from `offset` on."""
        tokens = self.record(index).tokens_S
        return tokens[offset : None if length is None else offset + length]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that all ids, those to be predicted included, are below `vocab_size`.

        Raises:
            ValueError: naming the file, the record and the id.
        """
        for file, entry in zip(self._files, self._entries, strict=True):
            token, record = entry["largest_id"].tolist()
            if token >= vocab_size:
                raise ValueError(
                    f"{file.path}, record {record}: it holds the token id {token}, but the "
                    f"vocabulary has {vocab_size} ids. The file was made with another vocabulary: "
                    "compare --tokenizer-type and --vocab-file"
                )


def _scanned(file: TFRecordFile, cache: IndexCache) -> StoredArrays:
    """Where the records of a file lie, and what of them must be known beforehand."""
    status = file.path.stat()
    depends_on = {
        "version": INDEX_VERSION,
        "file": str(file.path.absolute()),
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
    }

    def arrays() -> dict[str, np.ndarray]:
        logger.info("checking the records of %s, once", file.path)
        offsets, lengths, largest = [], [], (-1, 0)
        for number, offset in enumerate(file.offsets()):
            record = _read(file, offset, number)
            offsets.append(offset)
            lengths.append(len(record.tokens_S))
            ids = np.concatenate([record.tokens_S, record.labels_P])
            largest = max(largest, (int(ids.max()), number), key=lambda pair: pair[0])
        return {
            "offsets": np.array(offsets, np.int64),
            "lengths": np.array(lengths, np.int32),
            "largest_id": np.array(largest, np.int64),
        }

    return cache.arrays("tfrecords", depends_on, arrays)


def _read(file: TFRecordFile, offset: int, number: int) -> BertRecord:
    where = f"{file.path}, record {number}"
    return bert_record(parse_example(file.read(offset, number), where), where)
