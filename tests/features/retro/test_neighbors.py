"""Neighbours in upstream's files."""

import pickle

import numpy as np
import pytest
from upstream_retro import write_blocks

from megatron.features.retro.chunks import NeighborTable

h5py = pytest.importorskip("h5py")

KEPT = 20
CHUNKS = 4
SAMPLES = 7


@pytest.fixture
def rows() -> np.ndarray:
    found = np.random.default_rng(0).integers(0, 1 << 40, (SAMPLES * CHUNKS, KEPT))
    found[::3, 15:] = -1
    return found


@pytest.mark.parametrize("block", [1, 4, 10, 27, 28, 1000])
@pytest.mark.parametrize("options", [{}, {"chunks": (1, KEPT), "compression": "gzip"}], ids=str)
def test_rows_are_those_of_the_files(tmp_path, rows, block, options):
    """Blocks end within samples, at their ends, and beyond the last one."""
    write_blocks(tmp_path / "train_0a1b", rows, block, **options)
    table = NeighborTable(tmp_path / "train_0a1b", CHUNKS)
    assert len(table) == SAMPLES and table.kept == KEPT
    for sample in np.random.default_rng(1).permutation(SAMPLES).tolist():
        expected = rows[sample * CHUNKS : (sample + 1) * CHUNKS]
        np.testing.assert_array_equal(table.rows(sample), expected)
    assert table.rows(0).dtype == np.int64
    np.testing.assert_array_equal(table.chunk_rows(3, 26), rows[3:26])


def test_a_sample_that_does_not_exist(tmp_path, rows):
    write_blocks(tmp_path / "query", rows, 10)
    for sample in (-1, SAMPLES):
        with pytest.raises(IndexError):
            NeighborTable(tmp_path / "query", CHUNKS).rows(sample)


def test_a_copy_for_another_process_reads_the_files_itself(tmp_path, rows):
    write_blocks(tmp_path / "query", rows, 10)
    table = NeighborTable(tmp_path / "query", CHUNKS)
    for sample in range(SAMPLES):
        table.rows(sample)
    copy = pickle.dumps(table)
    assert len(copy) < rows.nbytes / 3
    np.testing.assert_array_equal(pickle.loads(copy).rows(6), rows[24:])


def test_files_that_are_being_written_are_not_read(tmp_path, rows):
    write_blocks(tmp_path / "query", rows, 10)
    (tmp_path / "query" / "028-038.hdf5.partial-00").write_bytes(b"")
    assert len(NeighborTable(tmp_path / "query", CHUNKS)) == SAMPLES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("000-010.hdf5", "rows between row 0 and 010-020.hdf5 are missing"),
        ("010-020.hdf5", "rows between 000-010.hdf5 and 020-028.hdf5 are missing"),
        ("020-028.hdf5", "--retro-gpt-seq-length or --retro-gpt-chunk-length"),
    ],
)
def test_missing_files_are_named(tmp_path, rows, name, expected):
    write_blocks(tmp_path / "query", rows, 10)
    (tmp_path / "query" / name).unlink()
    chunks = 3 if name == "020-028.hdf5" else CHUNKS
    with pytest.raises(ValueError, match=expected):
        NeighborTable(tmp_path / "query", chunks)


def test_rows_in_several_files_are_refused(tmp_path, rows):
    write_blocks(tmp_path / "query", rows, 10)
    write_blocks(tmp_path / "more", rows, 7)
    for file in (tmp_path / "more").iterdir():
        file.rename(tmp_path / "query" / file.name)
    with pytest.raises(ValueError, match=r"000-007\.hdf5 and 000-010\.hdf5 are in several files"):
        NeighborTable(tmp_path / "query", CHUNKS)


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_a_stage_that_did_not_run_is_named(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--retro-tasks query-pretraining-neighbors"):
        NeighborTable(tmp_path / folder, CHUNKS)


@pytest.mark.parametrize(
    "content",
    [np.zeros((10, KEPT), np.int32), np.zeros((9, KEPT), np.int64), np.zeros((10, 19), np.int64)],
    ids=["dtype", "rows", "kept"],
)
def test_a_file_of_another_layout_is_named(tmp_path, rows, content):
    write_blocks(tmp_path / "query", rows, 10)
    with h5py.File(tmp_path / "query" / "010-020.hdf5", "w") as file:
        file.create_dataset("neighbors", data=content)
    table = NeighborTable(tmp_path / "query", CHUNKS)
    with pytest.raises(ValueError, match=r"010-020\.hdf5: neighbors is int.* not int64 \[10, 20\]"):
        table.rows(3)


def test_chunks_that_are_longer_than_samples(tmp_path, rows):
    """As edited settings may say."""
    write_blocks(tmp_path / "query", rows, 10)
    with pytest.raises(ValueError, match="no whole samples of 0 chunks"):
        NeighborTable(tmp_path / "query", 0)


def test_a_first_file_without_columns_is_named(tmp_path, rows):
    write_blocks(tmp_path / "query", rows, 10)
    with h5py.File(tmp_path / "query" / "000-010.hdf5", "w") as file:
        file.create_dataset("neighbors", data=np.zeros(10, np.int64))
    table = NeighborTable(tmp_path / "query", CHUNKS)
    with pytest.raises(ValueError, match=r"000-010\.hdf5: neighbors is int64 \[10\], not int64"):
        table.rows(0)
