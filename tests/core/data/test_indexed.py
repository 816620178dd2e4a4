"""The indexed format: read, write, refuse what is damaged."""

import json
import os
import pickle
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data import indexed as dataset_module
from megatron.data.indexed import IndexedDataset, best_dtype

GOLDEN = Path(__file__).parents[2] / "golden" / "indexed"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
HEADER = 34
OPENWEBTEXT = "megatron_indexed/meg-gpt2-openwebtext_text_document"

# Runs under another interpreter, which has megatron-core: prints a checksum per sequence.
PEER = """
import json, sys, zlib
import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset
dataset = IndexedDataset(sys.argv[1], multimodal=len(sys.argv) > 2)
items = [dataset[i] for i in range(len(dataset))]
tokens, modes = zip(*items) if len(sys.argv) > 2 else (items, ())
print(json.dumps({
    "documents": dataset.document_indices.tolist(),
    "lengths": dataset.sequence_lengths.tolist(),
    "dtype": tokens[0].dtype.name,
    "sums": [zlib.crc32(t.astype("<i8").tobytes()) for t in tokens],
    "modes": [int(m) for m in modes],
}))
"""


@pytest.fixture
def peer_python() -> str:
    python = os.environ.get("MEGATRON_CORE_PYTHON")
    if not python:
        pytest.skip("MEGATRON_CORE_PYTHON names no python that has megatron-core")
    return python


def assert_equal_to_peer(python: str, prefix: Path) -> int:
    ours = IndexedDataset(prefix)
    command = [python, "-W", "ignore", "-c", PEER, str(prefix)]
    command += ["modes"] if ours.modes is not None else []
    # Not from here: this project has the same top-level package name.
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    peer = json.loads(result.stdout.splitlines()[-1])
    assert peer["documents"] == ours.document_indices.tolist()
    assert peer["lengths"] == ours.sequence_lengths.tolist()
    assert peer["dtype"] == ours.dtype.name
    assert peer["sums"] == [zlib.crc32(tokens.astype("<i8").tobytes()) for tokens in ours]
    assert peer["modes"] == ([] if ours.modes is None else ours.modes.tolist())
    return len(ours)


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def read(prefix: Path) -> list[list[list[int]]]:
    dataset = IndexedDataset(prefix)
    dataset.verify()
    bounds = dataset.document_indices.tolist()
    return [
        [dataset[i].tolist() for i in range(start, stop)]
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]


@pytest.mark.parametrize("name", EXPECTED)
def test_reading_against_megatron_core_golden(name: str) -> None:
    dataset = IndexedDataset(GOLDEN / name)
    assert dataset.dtype.name == name.removesuffix("_modes")
    assert read(GOLDEN / name) == EXPECTED[name]
    if name.endswith("_modes"):
        assert dataset.modes is not None
        expected = [n % 2 for n, document in enumerate(EXPECTED[name]) for _ in document]
        assert dataset.modes.tolist() == expected
    else:
        assert dataset.modes is None


@pytest.mark.parametrize("name", EXPECTED)
def test_writing_against_megatron_core_golden(name: str, tmp_path: Path) -> None:
    golden = IndexedDataset(GOLDEN / name)
    with IndexedDatasetWriter(tmp_path / "x", golden.dtype) as writer:
        for number, document in enumerate(EXPECTED[name]):
            modes = [number % 2] * len(document) if golden.modes is not None else None
            writer.add_document([np.array(s, golden.dtype) for s in document], modes)
    for ending in ("bin", "idx"):
        golden_bytes = (GOLDEN / f"{name}.{ending}").read_bytes()
        assert (tmp_path / f"x.{ending}").read_bytes() == golden_bytes


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_written_files_against_megatron_core(dtype: str, peer_python: str, tmp_path: Path) -> None:
    rng = np.random.RandomState(0)
    prefix = tmp_path / "ours"
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for number in range(200):
            sequences = [rng.randint(0, 256, rng.randint(0, 50)) for _ in range(rng.randint(0, 4))]
            modes = [number % 3] * len(sequences) if dtype == "int32" else None
            writer.add_document(sequences, modes)
    assert_equal_to_peer(peer_python, prefix)


@pytest.mark.realdata
def test_openwebtext_against_megatron_core(peer_python: str, realdata: Path) -> None:
    assert assert_equal_to_peer(peer_python, realdata / OPENWEBTEXT) == 1000


@pytest.mark.realdata
def test_openwebtext_copy_against_megatron_core(
    peer_python: str, realdata: Path, tmp_path: Path
) -> None:
    with IndexedDatasetWriter(tmp_path / "copy", "uint16") as writer:
        for tokens in IndexedDataset(realdata / OPENWEBTEXT):
            writer.add_document([tokens])
    assert assert_equal_to_peer(peer_python, tmp_path / "copy") == 1000
    for ending in ("bin", "idx"):
        original = (realdata / f"{OPENWEBTEXT}.{ending}").read_bytes()
        assert (tmp_path / f"copy.{ending}").read_bytes() == original


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 65_535), max_size=8), max_size=4), max_size=10
    )
)
def test_round_trip(documents: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("round_trip")
    assert read(write(folder / "one", documents)) == documents
    sequences = [s for document in documents for s in document]
    with IndexedDatasetWriter(folder / "bulk", "uint16") as writer:
        writer.add_documents(
            [token for s in sequences for token in s],
            [len(s) for s in sequences],
            [len(document) for document in documents],
        )
    with IndexedDatasetWriter(folder / "merged", "uint16") as writer:
        writer.add_document([[7]])
        writer.merge(folder / "bulk")
        writer.merge(folder / "one")
    assert read(folder / "merged") == [[[7]], *documents, *documents]


def test_items(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "x", [[[1, 2, 3, 4]], [[5]]]))
    assert len(dataset) == 2
    assert dataset.num_tokens == 5
    assert dataset.sequence_lengths.dtype == np.int32
    assert dataset.document_indices.dtype == np.int64
    assert dataset[-1].tolist() == [5]
    assert dataset.get(0, 1).tolist() == [2, 3, 4]
    assert dataset.get(0, 1, 2).tolist() == [2, 3]
    assert dataset.get(0, 4).tolist() == []
    for bad in ((2,), (-3,), (0, 5), (0, 2, 3), (0, -1)):
        with pytest.raises(IndexError, match="x"):
            dataset.get(*bad)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 9


def test_pickles_as_its_path(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "x", [[list(range(1000)) * 10]]))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[0].tolist() == dataset[0].tolist()


def test_blocks_cover_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_BLOCK", 4)
    prefix = write(tmp_path / "x", [[[i] * (i % 3)] for i in range(45)])
    assert len(read(prefix)) == 45
    monkeypatch.setattr(dataset_module, "_BLOCKS_AT_OPENING", 3)
    looked_at = list(dataset_module._blocks(45, 3))
    assert looked_at[0] == (0, 4) and looked_at[-1] == (44, 45) and len(looked_at) == 3
    # A wrong offset between the blocks passes the opening, and verify() names it.
    patch(prefix, HEADER + 4 * 45 + 8 * 7, struct.pack("<q", 12345))
    dataset = IndexedDataset(prefix)
    with pytest.raises(ValueError, match=r"x\.idx: sequence 6 .*12345"):
        dataset.verify()


def patch(prefix: Path, at: int, value: bytes, ending: str = "idx") -> None:
    path = Path(f"{prefix}.{ending}")
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"MMIDXXX", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "format version 2"),
        (17, b"\x09", "dtype code 9"),
        (18, struct.pack("<Q", 4), "cut short"),
        (18, struct.pack("<Q", 2), "appended"),
        (18, struct.pack("<Q", 1 << 60), "cut short"),
        (HEADER, struct.pack("<i", 3), "sequence 0"),
        (HEADER + 4, struct.pack("<i", -1), "length -1"),
        (HEADER + 12, struct.pack("<q", 2), "sequence 0 starts at byte 2"),
        (HEADER + 12 + 8, struct.pack("<q", 2), "next one starts at byte 2"),
        (HEADER + 36, struct.pack("<q", 1), "must be 0 and 3"),
        (HEADER + 36 + 24, struct.pack("<q", 2), "must be 0 and 3"),
        (HEADER + 36 + 8, struct.pack("<q", 9), "document 1 starts at sequence 9"),
    ],
)
def test_damaged_index(at: int, value: bytes, message: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[[1, 2]], [[3, 4, 5]], [[6]]])
    patch(prefix, at, value)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(prefix)
    assert "x.idx" in str(error.value)


def test_empty_index_file(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[[1, 2]]])
    Path(f"{prefix}.idx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"x\.idx has 0 bytes"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("size", "cause"), [(0, "cut short"), (11, "cut short"), (14, "different runs")]
)
def test_bin_of_another_size(size: int, cause: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[[1, 2]], [[3, 4, 5]], [[6]]])
    os.truncate(f"{prefix}.bin", size)
    with pytest.raises(ValueError, match=rf"x\.bin has {size} bytes.*expects 12: .*{cause}"):
        IndexedDataset(prefix)


def test_missing_files(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[[1]]])
    with pytest.raises(FileNotFoundError, match="without the ending"):
        IndexedDataset(f"{prefix}.bin")
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(FileNotFoundError, match=r"x\.idx does not exist.*has not finished"):
        IndexedDataset(prefix)
    with pytest.raises(FileNotFoundError, match=r"nothing\.idx does not exist"):
        IndexedDataset(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("dtype", "tokens", "message"),
    [
        ("uint16", [65_536], "token id 65536 does not fit uint16"),
        ("uint16", [-1], "token id -1 does not fit uint16"),
        ("int32", [2**31], "token id 2147483648"),
        ("uint16", [1.5], "must be integers"),
    ],
)
def test_tokens_that_do_not_fit(dtype: str, tokens: list, message: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=message),
        IndexedDatasetWriter(tmp_path / "x", dtype) as writer,
    ):
        writer.add_document([[1]])
        writer.add_document([tokens])
    assert list(tmp_path.iterdir()) == []


def test_counts_that_disagree(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", "uint16") as writer:
        with pytest.raises(ValueError, match="sequence_lengths"):
            writer.add_documents([1, 2, 3], [1, 1], [2])
        with pytest.raises(ValueError, match="sequences_per_document"):
            writer.add_documents([1, 2, 3], [1, 2], [1])
        with pytest.raises(ValueError, match="modes"):
            writer.add_documents([1, 2, 3], [1, 2], [2], modes=[0])
    with (
        pytest.raises(ValueError, match="for all or for none"),
        IndexedDatasetWriter(tmp_path / "y", "uint16") as writer,
    ):
        writer.add_document([[1]])
        writer.add_document([[1]], modes=[1])


def test_merging_another_dtype(tmp_path: Path) -> None:
    write(tmp_path / "narrow", [[[1]]], "uint16")
    with (
        pytest.raises(ValueError, match=r"narrow\.bin \(uint16.*wide\.bin \(int32"),
        IndexedDatasetWriter(tmp_path / "wide", "int32") as writer,
    ):
        writer.merge(tmp_path / "narrow")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["narrow.bin", "narrow.idx"]


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[[1]]])
    before = Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
    writer = IndexedDatasetWriter(prefix, "uint16")
    writer.add_document([[2, 3]])
    assert (Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()) == before
    writer.close()
    writer.close()
    assert read(prefix) == [[[2, 3]]]
    assert len(list(tmp_path.iterdir())) == 2


def test_death_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "x", [[[1]]])
    rename = os.replace

    def die_at_the_index(source: Path, target: Path) -> None:
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", die_at_the_index)
    with pytest.raises(KeyboardInterrupt):
        write(prefix, [[[2]]])
    with pytest.raises(FileNotFoundError):  # not: old index, new tokens of the same size
        IndexedDataset(prefix)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = IndexedDatasetWriter(tmp_path / "x", "uint16")
    writer._stream.close()
    monkeypatch.setattr(writer, "_stream", open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left.*x\.bin"), writer:
        writer.add_document([[1] * 4_000_000])
    assert list(tmp_path.iterdir()) == []


def test_best_dtype() -> None:
    assert best_dtype(50_257) == best_dtype(65_499) == np.uint16
    assert best_dtype(65_500) == best_dtype(None) == np.int32
