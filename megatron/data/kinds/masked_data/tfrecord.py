"""Reads TFRecord files of tf.train.Example messages, by record number and without TensorFlow.

A file is records, one behind the other (little endian):

    uint64 number of bytes n | uint32 checksum of those 8 bytes | n bytes | uint32 checksum of them

The checksum is CRC-32C, rotated right by 15 bits, plus 0xA282EAD8. The bytes of a record are a
message tf.train.Example: a map from names to lists of integers, floats or strings.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_GZIP_MAGIC = b"\x1f\x8b"
_OVERHEAD = _LENGTH.size + _CHECKSUM.size


def masked_crc(data: bytes) -> int:
    """The checksum that a TFRecord file stores of some bytes."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecordFile:
    """One memory-mapped file; pickling reopens it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, or compressed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no TFRecord file {self.path}")
        with self.path.open("rb") as file:
            if not self.path.stat().st_size:
                raise ValueError(f"{self.path} is empty: it holds no TFRecords")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._bytes[:2] == _GZIP_MAGIC and not _is_length(self._bytes[: _LENGTH.size]):
            raise ValueError(
                f"{self.path} is compressed, and records are read out of order: unpack it (gunzip)"
            )

    def __reduce__(self) -> tuple[type[TFRecordFile], tuple[Path]]:
        return type(self), (self.path,)

    def offsets(self) -> Iterator[int]:
        """The byte at which each record begins.

        Raises:
            ValueError: a record is cut short, or its length is damaged; the message names the file
                and the number of the record.
        """
        position, record = 0, 0
        while position < len(self._bytes):
            yield position
            position += _OVERHEAD + self._length(position, record)
            record += 1

    def read(self, offset: int, record: int) -> bytes:
        """The bytes of the record at byte `offset`, checked.

        Args:
            record: its number, for messages.

        Raises:
            ValueError: the record is damaged.
        """
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
                "wrong: the file is damaged there, or holds no TFRecords"
            )
        length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
        missing = offset + _OVERHEAD + length - len(self._bytes)
        if missing > 0:
            raise ValueError(
                f"{self.path}, record {record}: the file ends {missing} bytes before its end: it "
                "was cut short; fetch or make it again"
            )
        return int(length)


def parse_example(data: bytes, where: str) -> dict[str, Any]:
    """The features of a tf.train.Example: lists of values by name.

    Args:
        where: names the record in messages.

    Raises:
        ValueError: the bytes are no such message.
    """
    example = _example_class()()
    try:
        example.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"{where} is no tf.train.Example message ({error})") from None
    values = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        values[name] = getattr(feature, kind).value if kind else []
    return values


@functools.cache
def _example_class() -> Any:
    """The message class, described here: TensorFlow's own module comes with TensorFlow."""
    fields = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tfrecord", syntax="proto3"
    )

    def field(message: Any, number: int, name: str, kind: int, **more: Any) -> None:
        more.setdefault("label", fields.LABEL_OPTIONAL)
        message.field.add(name=name, number=number, type=kind, **more)

    repeated = {"label": fields.LABEL_REPEATED}
    lists = {
        "BytesList": ("bytes_list", fields.TYPE_BYTES),
        "FloatList": ("float_list", fields.TYPE_FLOAT),
        "Int64List": ("int64_list", fields.TYPE_INT64),
    }
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (message_name, (name, kind)) in enumerate(lists.items(), 1):
        field(file.message_type.add(name=message_name), 1, "value", kind, **repeated)
        type_name = f".tfrecord.{message_name}"
        field(feature, number, name, fields.TYPE_MESSAGE, type_name=type_name, oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    field(entry, 1, "key", fields.TYPE_STRING)
    field(entry, 2, "value", fields.TYPE_MESSAGE, type_name=".tfrecord.Feature")
    entry_name = ".tfrecord.Features.FeatureEntry"
    field(features, 1, "feature", fields.TYPE_MESSAGE, type_name=entry_name, **repeated)
    example = file.message_type.add(name="Example")
    field(example, 1, "features", fields.TYPE_MESSAGE, type_name=".tfrecord.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tfrecord.Example"))


def _is_length(header: bytes) -> bool:
    """Whether a record begins with this: its length and the checksum of it."""
    if len(header) < _LENGTH.size:
        return False
    return masked_crc(header[:8]) == _LENGTH.unpack(header)[1]
