"""TFRecord's frames and protocol buffers, written by hand."""

from __future__ import annotations

import struct

from megatron.features.masked.tfrecord import masked_crc


def frame(data: bytes) -> bytes:
    """A record with its checksums."""
    length = struct.pack("<Q", len(data))
    sums = (struct.pack("<I", masked_crc(part)) for part in (length, data))
    return length + next(sums) + data + next(sums)


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features: dict[str, list]) -> bytes:
    """A tf.train.Example."""
    entries = b""
    for name, values in features.items():
        if isinstance(values[0], float):
            kind, content = 2, b"".join(struct.pack("<f", value) for value in values)
        else:
            kind, content = 3, b"".join(map(varint, values))
        feature = field(kind, field(1, content))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)
