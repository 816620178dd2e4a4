"""TFRecords: against records written here byte by byte; damage of every kind is refused by name.

That TensorFlow's own files are read is shown in test_masked_realdata.py.
"""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index_cache import IndexCache
from megatron.data.loader import MicroBatches
from megatron.features.masked.batch import collate_bert
from megatron.features.masked.tfrecord import TFRecordFile, TFRecordRecipe, TFRecords, masked_crc

PAD, VOCAB_SIZE = 0, 1000


def crc32c(data: bytes) -> int:
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features: dict[str, list], packed: bool = True) -> bytes:
    """A tf.train.Example in protocol buffers' wire format."""
    entries = b""
    for name, values in features.items():
        if values and isinstance(values[0], float):
            parts, kind, wire = [struct.pack("<f", value) for value in values], 2, 5
        else:
            parts, kind, wire = [varint(value) for value in values], 3, 0
        if packed:
            content = field(1, b"".join(parts))
        else:
            content = b"".join(varint(1 << 3 | wire) + part for part in parts)
        entries += field(1, field(1, name.encode()) + field(2, field(kind, content)))
    return field(1, entries)


def features(number: int = 0, size: int = 8) -> dict[str, list]:
    """A record of `size` - 2 tokens and 2 of padding, its ids from 10 * number on."""
    return {
        "input_ids": [10 * number + i for i in range(1, size - 1)] + [0, 0],
        "input_mask": [1] * (size - 2) + [0, 0],
        "segment_ids": [0, 0] + [1] * (size - 4) + [0, 0],
        "masked_lm_positions": [2, 4, 0],
        "masked_lm_ids": [700 + number, 800 + number, 0],
        "masked_lm_weights": [1.0, 1.0, 0.0],
        "next_sentence_labels": [number % 2],
    }


def write(path: Path, records: list[dict[str, list]], packed: bool = True) -> str:
    path.write_bytes(b"".join(frame(example(record, packed)) for record in records))
    return str(path)


def recipe(seq_length: int = 12, vocab_size: int = VOCAB_SIZE, seed: int = 1) -> TFRecordRecipe:
    return TFRecordRecipe(seq_length, seed, PAD, vocab_size)


def test_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, appendix B.4, has 32 zero bytes:
    assert crc32c(bytes(32)) == 0x8A9136AA
    for data in (b"", b"a", bytes(range(256))):
        assert struct.pack("<I", masked_crc(data)) == checksum(data)


@pytest.mark.parametrize("packed", [True, False])
def test_samples(packed: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [features(n) for n in range(20)], packed)
    records = TFRecords(path, IndexCache(None))
    assert len(records) == 20 and records.document_indices.tolist() == list(range(21))
    assert records.sequence_lengths.tolist() == [6] * 20
    assert records.get(3).tolist() == [31, 32, 33, 34, 35, 36]
    assert records.get(3, 2, 3).tolist() == [33, 34, 35]
    dataset = recipe().build(records, range(5, 20), 40, "train", IndexCache(None))
    assert len(dataset) == 40
    numbers = []
    for i in range(40):
        (piece,) = dataset.origin(i)
        assert piece.source == path and (piece.start, piece.stop) == (0, 6)
        n = piece.sequence
        numbers.append(n)
        sample = dataset[i]
        assert sample.tokens_S.tolist() == [10 * n + j for j in range(1, 7)] + [PAD] * 6
        assert sample.types_S.tolist() == [0, 0, 1, 1, 1, 1] + [0] * 6
        assert sample.padding_mask_S.tolist() == [1] * 6 + [0] * 6
        assert sample.labels_S.tolist() == [-1, -1, 700 + n, -1, 800 + n] + [-1] * 7
        assert sample.loss_mask_S.tolist() == [0, 0, 1, 0, 1] + [0] * 7
        assert sample.is_random == n % 2
    for epoch in (numbers[:15], numbers[15:30]):
        assert sorted(epoch) == list(range(5, 20))
    assert numbers[:15] != sorted(numbers[:15]) != numbers[15:30] != numbers[:15]
    few = recipe().build(records, range(5, 20), 7, "train", IndexCache(None))
    assert [few.origin(i)[0].sequence for i in range(7)] == numbers[:7]
    other = recipe().build(records, range(5, 20), 15, "valid", IndexCache(None))
    assert [other.origin(i)[0].sequence for i in range(15)] != numbers[:15]
    with pytest.raises(IndexError, match="sample 40 of a dataset of 40"):
        dataset[40]


def test_nothing_to_predict(tmp_path: Path) -> None:
    names = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    path = write(tmp_path / "a.tfrecord", [features(0) | {name: [] for name in names}])
    records = TFRecords(path, IndexCache(None))
    sample = recipe().build(records, range(1), 1, "train", IndexCache(None))[0]
    assert not sample.loss_mask_S.any() and (sample.labels_S == -1).all()


def test_several_files(tmp_path: Path) -> None:
    for name, numbers in (("b", range(4, 7)), ("a", range(4)), ("c", range(7, 9))):
        write(tmp_path / f"{name}.tfrecord", [features(n) for n in numbers])
    records = TFRecords(str(tmp_path / "*.tfrecord"), IndexCache(tmp_path / "cache"))
    assert [int(records.get(i)[0]) // 10 for i in range(9)] == list(range(9))
    assert records.piece(5) == (str(tmp_path / "b.tfrecord"), 1, 0, 6)
    assert len(list((tmp_path / "cache").glob("tfrecords-*/description.json"))) == 3
    again = TFRecords(str(tmp_path / "*.tfrecord"), IndexCache(tmp_path / "cache"))
    assert np.array_equal(again.get(8), records.get(8))
    with pytest.raises(FileNotFoundError, match="matches no file"):
        TFRecords(str(tmp_path / "*.record"), IndexCache(None))
    with pytest.raises(FileNotFoundError, match=r"the TFRecord file .*d\.tfrecord does not exist"):
        TFRecords(str(tmp_path / "d.tfrecord"), IndexCache(None))


@pytest.mark.parametrize("workers", [0, 2])
def test_through_the_loader(workers: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [features(n) for n in range(20)])
    records = TFRecords(path, IndexCache(tmp_path))
    dataset = recipe().build(records, range(20), 40, "train", IndexCache(tmp_path))
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(copy[7].labels_S, dataset[7].labels_S)
    batches = MicroBatches(dataset, collate_bert, micro_batch_size=4, num_workers=workers)
    found = [next(batches) for _ in range(10)]
    batches.close()
    for i in range(40):
        *values, documents = dataset[i]
        assert documents is None and found[i // 4].document_ids_BS is None
        for column, value in zip(found[i // 4], values, strict=False):
            assert np.array_equal(column[i % 4].numpy(), value)


DAMAGE = {
    "cut in the length": (lambda b, starts: b[: starts[2] + 7], "record 2: the file ends"),
    "cut in the data": (lambda b, starts: b[: starts[2] + 50], "record 2: the file ends"),
    "cut in the checksum": (lambda b, starts: b[:-2], "record 2: the file ends 2 bytes"),
    "a bit of the length": (lambda b, starts: flip(b, starts[1]), "record 1 .* its length"),
    "a bit of its checksum": (lambda b, starts: flip(b, starts[1] + 9), "record 1 .* its length"),
    "a bit of the data": (lambda b, starts: flip(b, starts[1] + 40), "record 1: the checksum"),
    "a bit of their checksum": (lambda b, starts: flip(b, starts[2] - 1), "record 1: the checksum"),
    "something behind": (lambda b, starts: b + b"more", "record 3: the file ends"),
    "zeros behind": (lambda b, starts: b + bytes(64), "record 3 .* its length is wrong"),
    "text": (lambda b, starts: b"one sentence\n" * 9, "record 0 .* is not a TFRecord file"),
    "nothing": (lambda b, starts: b"", "is empty"),
    "compressed": (lambda b, starts: gzip.compress(b), "is compressed.*gunzip"),
    "no message": (
        lambda b, starts: b[: starts[1]] + frame(b"\xff" * 9),
        "record 1 is not a tf.train",
    ),
    "an empty message": (lambda b, starts: b + frame(b""), "record 3 has no input_ids.*nothing"),
}


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, [features(n) for n in range(3)])
    starts = list(TFRecordFile(path).offsets())
    damage, message = DAMAGE[kind]
    path.write_bytes(damage(path.read_bytes(), starts))
    with pytest.raises(ValueError, match=rf"a\.tfrecord.*{message}"):
        TFRecords(str(path), IndexCache(tmp_path / "cache"))


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Of one record: in the length, the checksums and the data."""
    path = tmp_path / "a.tfrecord"
    write(path, [features(1)])
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(flip(whole, position))
        with pytest.raises(ValueError, match=r"a\.tfrecord"):
            TFRecords(str(path), IndexCache(None))


FEATURES = {
    "no labels": ({"masked_lm_ids": None}, "has no masked_lm_ids"),
    "no ids": ({"input_ids": [], "input_mask": [], "segment_ids": []}, "no input_ids"),
    "floats": ({"input_ids": [1.0] * 8}, "input_ids are not integers"),
    "integers": ({"masked_lm_weights": [1, 1, 0]}, "masked_lm_weights are not floats"),
    "short mask": ({"input_mask": [1] * 7}, "8 input_ids, 7 input_mask"),
    "short types": ({"segment_ids": [0] * 9}, "9 segment_ids"),
    "short labels": ({"masked_lm_ids": [7, 7]}, "3 masked_lm_positions, 2 masked_lm_ids"),
    "short weights": ({"masked_lm_weights": [1.0]}, "and 1 masked_lm_weights"),
    "hole in the mask": ({"input_mask": [1, 0, 1, 1, 1, 1, 0, 0]}, "input_mask is not 1"),
    "empty mask": ({"input_mask": [0] * 8}, "input_mask is not 1"),
    "large mask": ({"input_mask": [2, 1, 1, 1, 0, 0, 0, 0]}, "input_mask is not 1"),
    "rest of the mask": ({"input_mask": [1, 1, 0, 0, 0, 0, 5, -5]}, "input_mask is not 1"),
    "nothing predicted": (
        {"masked_lm_positions": [], "masked_lm_ids": [], "masked_lm_weights": [1.0]},
        "0 masked_lm_positions",
    ),
    "types": ({"segment_ids": [2] * 8}, "segment_ids are not all"),
    "weights": ({"masked_lm_weights": [0.5, 1.0, 0.0]}, "masked_lm_weights are not all"),
    "two answers": ({"next_sentence_labels": [0, 1]}, r"next_sentence_labels are \[0, 1\]"),
    "no answer": ({"next_sentence_labels": []}, r"next_sentence_labels are \[\]"),
    "wrong answer": ({"next_sentence_labels": [2]}, r"next_sentence_labels are \[2\]"),
    "in the padding": ({"masked_lm_positions": [2, 6, 0]}, "masked_lm_positions .* 6 tokens"),
    "negative position": ({"masked_lm_positions": [2, -1, 0]}, "masked_lm_positions"),
    "twice": ({"masked_lm_positions": [2, 2, 0]}, "all different"),
    "negative id": ({"input_ids": [-5, 1, 1, 1, 1, 1, 0, 0]}, "token ids are negative"),
    "negative label": ({"masked_lm_ids": [-5, 7, 0]}, "token ids are negative"),
}


@pytest.mark.parametrize("kind", FEATURES)
def test_wrong_features(kind: str, tmp_path: Path) -> None:
    change, message = FEATURES[kind]
    wrong = features(1) | change
    wrong = {name: values for name, values in wrong.items() if values is not None}
    path = write(tmp_path / "a.tfrecord", [features(0), wrong])
    with pytest.raises(ValueError, match=rf"a\.tfrecord, record 1:? .*{message}"):
        TFRecords(path, IndexCache(None))


@pytest.mark.parametrize("place", ["input_ids", "masked_lm_ids"])
def test_another_vocabulary(place: str, tmp_path: Path) -> None:
    large = features(2)
    large[place][0] = 1000
    path = write(tmp_path / "a.tfrecord", [features(0), features(1), large])
    records = TFRecords(path, IndexCache(None))
    with pytest.raises(ValueError, match=r"a\.tfrecord, record 2: .* id 1000, .* has 1000 ids"):
        recipe().build(records, range(3), 5, "train", IndexCache(None))
    recipe(vocab_size=1001).build(records, range(3), 5, "train", IndexCache(None))


def test_too_long(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [features(0), features(1, 14), features(2)])
    records = TFRecords(path, IndexCache(None))
    with pytest.raises(ValueError, match=r"record 1: it has 12 tokens, .* --seq-length 12 or more"):
        recipe(11).build(records, range(3), 5, "train", IndexCache(None))
    assert len(recipe(12).build(records, range(3), 5, "train", IndexCache(None))[0].tokens_S) == 12
    recipe(11).build(records, range(2, 3), 5, "train", IndexCache(None))
    with pytest.raises(ValueError, match="no records for test"):
        recipe().build(records, range(0), 5, "test", IndexCache(None))


def test_damage_after_the_check(tmp_path: Path) -> None:
    """A file that changes between two runs is checked again; one that changes in one, when read."""
    path = Path(write(tmp_path / "a.tfrecord", [features(n) for n in range(3)]))
    cache = IndexCache(tmp_path / "cache")
    records = TFRecords(str(path), cache)
    with path.open("r+b") as file:
        file.seek(60)
        file.write(b"\xee")
    with pytest.raises(ValueError, match="record 0: the checksum"):
        records.get(0)
    with pytest.raises(ValueError, match="record 0: the checksum"):
        TFRecords(str(path), cache)
