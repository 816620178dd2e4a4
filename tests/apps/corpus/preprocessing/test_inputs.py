"""Input files: which they are, how they are unpacked, where a line is."""

import gzip

import pytest
import zstandard

from megatron.apps.corpus.preprocessing.inputs import expand_inputs, read_batches

LINES = [b'{"text": "%d"}\n' % i for i in range(5000)]


def pack_gzip(data: bytes) -> bytes:
    return gzip.compress(data[:1000]) + gzip.compress(data[1000:])


def pack_zstd(data: bytes) -> bytes:
    """Two frames, one with its size in the header and one without, and a skippable frame."""
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    second = stream.compress(data[1000:]) + stream.flush()
    return zstandard.compress(data[:1000]) + skippable + second


PACKERS = {"plain": bytes, "gzip": pack_gzip, "zstd": pack_zstd}


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst"])
def test_lines_whatever_the_packing_and_the_name(tmp_path, kind, name):
    path = tmp_path / name
    path.write_bytes(PACKERS[kind](b"".join(LINES)))
    batches = list(read_batches([path], 64))
    assert [line for batch in batches for line in batch.lines] == LINES
    assert [batch.first_line for batch in batches] == list(range(1, 5001, 64))
    assert batches[-1].position == path.stat().st_size


def test_positions_and_numbers_go_over_files(tmp_path):
    for name, data in (("a", b"1\n2\n3"), ("b", b""), ("c", b"\xef\xbb\xbf4\n")):
        (tmp_path / name).write_bytes(data)
    batches = list(read_batches([tmp_path / name for name in "abc"], 2))
    found = [(b.path.name, b.first_line, b.lines, b.position) for b in batches]
    assert [entry[:3] for entry in found] == [
        ("a", 1, [b"1\n", b"2\n"]),
        ("a", 3, [b"3"]),
        ("c", 1, [b"4\n"]),
    ]
    assert found[-1][3] == 10


def test_long_lines_make_small_batches(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes((b"x" * (3 << 18) + b"\n") * 4)
    assert [len(batch.lines) for batch in read_batches([path], 1000)] == [2, 2]


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_files_are_named(tmp_path, kind, damage):
    packed = PACKERS[kind](b"".join(LINES))
    path = tmp_path / "in.jsonl"
    middle = len(packed) // 2
    changed = packed[:middle] + bytes(255 - b for b in packed[middle : middle + 40])
    path.write_bytes(packed[:-20] if damage == "cut" else changed + packed[middle + 40 :])
    with pytest.raises(ValueError, match="--input .*in.jsonl is damaged or cut short"):
        list(read_batches([path], 1000))


def test_expand_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("d/b.jsonl", "d/sub/a.json.gz", "d/readme.md", "x[1].jsonl", "y2", "y1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def names(*patterns: str) -> list[str]:
        return list(map(str, expand_inputs(patterns, (".jsonl", ".json"))))

    assert names("y2", "d") == ["y2", "d/b.jsonl", "d/sub/a.json.gz"]
    assert names("y*", "y2") == ["y1", "y2"], "sorted, each once"
    assert names("**/*.jsonl") == ["d/b.jsonl", "x[1].jsonl"]
    assert names("x[1].jsonl") == ["x[1].jsonl"], "a file's own name is no glob"
    (tmp_path / "empty").mkdir()
    for pattern, message in (
        ("z", "--input z does not exist"),
        ("z*", "--input z\\* matches no file"),
        ("empty", "--input empty is a folder without files \\*.jsonl \\*.json"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            names(pattern)
