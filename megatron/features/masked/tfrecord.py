"""BERT samples in TFRecord files (`--use-tfrecords`), already masked, read without TensorFlow.

A file is a sequence of records (little endian):

  uint64 number of bytes n | uint32 checksum of those 8 bytes | n bytes | uint32 checksum of them

The checksum is CRC-32C, rotated right by 15 bits, plus 0xA282EAD8. The n bytes of a record are a
message tf.train.Example, a map from names to lists of integers, floats or strings, as written by
google-research/bert's create_pretraining_data.py. It contains input_ids, input_mask and segment_ids
of one length, masked_lm_positions, masked_lm_ids and masked_lm_weights of another, and
next_sentence_labels (0 next, 1 random). The masks are the same in every epoch, unless that program
varied them with --dupe_factor.

Shape suffixes: S input ids of a record, P its predicted tokens.
"""

from __future__ import annotations

import functools
import logging
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from megatron.config import ConfigError
from megatron.data.build import SourceReader
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.pipeline import DataKind, DataPipeline
from megatron.data.samples import Documents, Piece, checked_index
from megatron.features.masked.batch import BertSample
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.segments import INDEX_VERSION, epoch_rng

logger = logging.getLogger(__name__)

# Version of a file's cached arrays, part of the cache key. Increment it when the arrays change.
RECORDS_VERSION = 1
_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_GZIP_MAGIC = b"\x1f\x8b"
_OVERHEAD = _LENGTH.size + _CHECKSUM.size
_INTEGERS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
_WEIGHTS = "masked_lm_weights"
# Definition of the message type tf.train.Example, which is otherwise only available in TensorFlow.
_EXAMPLE = """
name: "example.proto" package: "tfrecord" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".tfrecord.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".tfrecord.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".tfrecord.Int64List" oneof_index: 0 } }
message_type { name: "Features"
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE
            type_name: ".tfrecord.Feature" } }
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE
          type_name: ".tfrecord.Features.FeatureEntry" } }
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".tfrecord.Features" } }
"""


def masked_crc(data: bytes) -> int:
    """Return the checksum that TFRecord files store for ``data``."""
    import google_crc32c  # not needed by code that only imports this module

    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecordFile:
    """Memory-mapped TFRecord file, reopened when unpickled. Raises FileNotFoundError if the file
    does not exist, and ValueError if it is empty or compressed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"the TFRecord file {self.path} does not exist")
        with self.path.open("rb") as file:
            if not self.path.stat().st_size:
                raise ValueError(f"{self.path} is empty: it has no TFRecords")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._bytes[:2] == _GZIP_MAGIC and not _is_length(self._bytes[: _LENGTH.size]):
            raise ValueError(
                f"{self.path} is compressed, and records are read out of order: unpack it (gunzip)"
            )

    def __reduce__(self) -> tuple[type[TFRecordFile], tuple[Path]]:
        return type(self), (self.path,)

    def offsets(self) -> Iterator[int]:
        """Yield the byte offset of each record. Raises ValueError if a record is damaged."""
        position, record = 0, 0
        while position < len(self._bytes):
            yield position
            position += _OVERHEAD + self._length(position, record)
            record += 1

    def read(self, offset: int, record: int) -> bytes:
        """Return the bytes of the record at byte `offset`. Raises ValueError with the record number
        if the record is damaged."""
        length = self._length(offset, record)
        start = offset + _LENGTH.size
        data = self._bytes[start : start + length]
        (checksum,) = _CHECKSUM.unpack_from(self._bytes, start + length)
        if masked_crc(data) != checksum:
            raise ValueError(
                f"{self.path}, record {record}: the checksum of its {length} bytes is wrong: the "
                "file is damaged; fetch or make it again"
            )
        return data

    def _length(self, offset: int, record: int) -> int:
        header = self._bytes[offset : offset + _LENGTH.size]
        if len(header) == _LENGTH.size and not _is_length(header):
            raise ValueError(
                f"{self.path}, record {record} (byte {offset}): the checksum of its length is "
                "wrong: the file is damaged there, or is not a TFRecord file"
            )
        length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
        missing = offset + _OVERHEAD + length - len(self._bytes)
        if missing > 0:
            raise ValueError(
                f"{self.path}, record {record}: the file ends {missing} bytes before its end: it "
                "was cut short; fetch or make it again"
            )
        return int(length)


def _is_length(header: bytes) -> bool:
    if len(header) < _LENGTH.size:
        return False
    return masked_crc(header[:8]) == _LENGTH.unpack(header)[1]


@functools.cache
def _example_class() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tfrecord.Example"))


class BertRecord(NamedTuple):
    """TFRecord after validation, without padding."""

    tokens_S: npt.NDArray[np.int64]
    types_S: npt.NDArray[np.int64]
    positions_P: npt.NDArray[np.int64]
    """Positions of the predicted tokens."""
    labels_P: npt.NDArray[np.int64]
    """Original tokens at ``positions_P``."""
    is_random: int


def bert_record(features: Mapping[str, Any], where: str) -> BertRecord:
    """Build a record from its features, lists of values by name. Raises ValueError if a feature is
    missing, or has a wrong length or value. ``where`` is the beginning of the error message."""
    missing = [name for name in (*_INTEGERS, _WEIGHTS) if name not in features]
    if missing:
        raise ValueError(
            f"{where} has no {', '.join(missing)} (it has "
            f"{', '.join(sorted(features)) or 'nothing'}): it is not a pretraining sample of "
            "BERT's create_pretraining_data.py"
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

    check(len(ids) > 0, "it has no input_ids")
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
        "input_mask is not 1 for each token and 0 after them",
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
    check(ids.min() >= 0 and (labels >= 0).all(), "token ids are negative")
    tokens, types, positions, labels = (
        array.astype(np.int64) for array in (ids[:length], types[:length], positions, labels)
    )
    return BertRecord(tokens, types, positions, labels, int(following[0]))


def _read_record(file: TFRecordFile, offset: int, number: int) -> BertRecord:
    where = f"{file.path}, record {number}"
    example = _example_class()()
    try:
        example.ParseFromString(file.read(offset, number))
    except DecodeError as error:
        raise ValueError(f"{where} is not a tf.train.Example message ({error})") from None
    features = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        features[name] = getattr(feature, kind).value if kind else []
    return bert_record(features, where)


class TFRecords(Documents):
    """Records of one or more TFRecord files, each a document with one sequence, its input ids.
    Every record is checked when its file is first opened, and the record offsets are cached.

    `path`: a file, or a glob such as data/part-*.tfrecord, sorted. Raises FileNotFoundError if a
    file does not exist, and ValueError if a record is damaged or not a BERT sample."""

    def __init__(self, path: str, cache: IndexCache) -> None:
        self.prefix = path
        names = sorted(glob(path)) if has_magic(path) and not Path(path).exists() else [path]
        if not names:
            raise FileNotFoundError(f"{path} matches no file")
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
        """Number of records, on which alone the order of samples depends."""
        return f"{len(self)} records"

    def verify(self) -> None:
        """Do nothing, because every record was checked when its file was first opened."""

    def record(self, index: int) -> BertRecord:
        """Return record `index`, counted across all files."""
        file, number = self._place(index)
        return _read_record(self._files[file], int(self._entries[file]["offsets"][number]), number)

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first_records, index, side="right")) - 1
        return file, index - int(self._first_records[file])

    def piece(self, index: int) -> Piece:
        """Return the span of a record: its file, its number in the file, and all of its tokens."""
        file, number = self._place(index)
        return Piece(str(self._files[file].path), number, 0, int(self.sequence_lengths[index]))

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """Return `length` input ids of record `index` from `offset` on; None reads to its end."""
        tokens = self.record(index).tokens_S
        return tokens[offset : None if length is None else offset + length]

    def check_vocabulary(self, vocab_size: int) -> None:
        for file, entry in zip(self._files, self._entries, strict=True):
            token, record = entry["largest_id"].tolist()
            if token >= vocab_size:
                raise ValueError(
                    f"{file.path}, record {record}: it contains the token id {token}, but the "
                    f"vocabulary has {vocab_size} ids. The file was made with another vocabulary: "
                    "compare --tokenizer-type and --vocab-file"
                )


def _scanned(file: TFRecordFile, cache: IndexCache) -> StoredArrays:
    """Return the offsets and lengths of a file's records, and the largest id with its record."""
    status = file.path.stat()
    depends_on = {
        "version": RECORDS_VERSION,
        "file": str(file.path.absolute()),
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
    }

    def arrays() -> dict[str, np.ndarray]:
        logger.info("checking the records of %s, once", file.path)
        offsets, lengths, largest = [], [], (-1, 0)
        for number, offset in enumerate(file.offsets()):
            record = _read_record(file, offset, number)
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


@dataclass(frozen=True)
class TFRecordRecipe:
    """Recipe for shuffled BERT samples from TFRecords, which are already masked."""

    seq_length: int
    """Number of tokens of a sample, including padding."""
    seed: int
    pad: int
    vocab_size: int

    def units(self, documents: Documents) -> int:
        return len(documents)

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> TFRecordDataset:
        """Build `num_samples` samples from the records `units`; see `SampleRecipe.build`. Raises
        ValueError if there is no record, or if a record is too long or uses another vocabulary."""
        assert isinstance(documents, TFRecords), "TFRecordRecipe makes samples of TFRecords"
        if not units:
            raise ValueError(f"{documents.prefix}: it has no records for {name}")
        documents.check_vocabulary(self.vocab_size)
        longest = units.start + int(documents.sequence_lengths[units.start : units.stop].argmax())
        piece = documents.piece(longest)
        if piece.stop > self.seq_length:
            raise ValueError(
                f"{piece.source}, record {piece.sequence}: it has {piece.stop} tokens, more than "
                f"--seq-length {self.seq_length}: give --seq-length {piece.stop} or more"
            )
        depends_on = {
            "version": INDEX_VERSION,
            "records": [units.start, units.stop],
            "samples": num_samples,
            "seed": self.seed,
            "part": name,
        }

        def arrays() -> dict[str, np.ndarray]:
            dtype = np.int32 if units.stop <= np.iinfo(np.int32).max else np.int64
            order = np.empty(num_samples, dtype)
            for epoch, start in enumerate(range(0, num_samples, len(units))):
                records = epoch_rng(self.seed, name, epoch).permutation(len(units))
                order[start : start + len(units)] = units.start + records[: num_samples - start]
            return {"order": order}

        index = cache.arrays(f"tfrecord-{name}", depends_on, arrays)
        return TFRecordDataset(documents, self, index)


class TFRecordDataset:
    """Dataset of BERT samples, built by TFRecordRecipe.build."""

    def __init__(self, records: TFRecords, recipe: TFRecordRecipe, index: StoredArrays) -> None:
        self.records, self.recipe = records, recipe
        self._index = index

    def __len__(self) -> int:
        return len(self._index["order"])

    def __getitem__(self, index: int, /) -> BertSample:
        record = self.records.record(self._record(index))
        return BertSample.padded(*record, seq_length=self.recipe.seq_length, pad=self.recipe.pad)

    def origin(self, index: int, /) -> list[Piece]:
        """Return the span of the sample's record: its file, its number there, and all its
        tokens."""
        return [self.records.piece(self._record(index))]

    def _record(self, index: int) -> int:
        return int(self._index["order"][checked_index(index, len(self))])


class MaskedData(DataKind):
    def reader(self, data: DataPipeline) -> SourceReader:
        tokenizer, config = data.tokenizer, data.config
        if config.section(MaskedDataConfig).bert_packing:
            raise ConfigError(
                "--bert-packing packs samples that are made from documents; those of TFRecord "
                "files are complete: leave it out, or give indexed files"
            )
        if config.model.token_types == 1:
            raise ConfigError(
                "--num-tokentypes 1 is less than the two segments of samples in TFRecord files; "
                "give 2 or more, or 0 for none"
            )
        recipe = TFRecordRecipe(data.seq_length, data.seed, tokenizer.pad, tokenizer.vocab_size)
        return SourceReader(lambda path, source: TFRecords(path, data.cache(path)), recipe)


KIND = MaskedData()
