"""Work in blocks: which are made, what is told, and what validation compares."""

import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron.apps.retro import blocks as module
from megatron.apps.retro.blocks import blocks_of, run_blocks
from megatron.features.retro.hdf5 import read_array, write_arrays

pytest.importorskip("h5py")


def numbers(block):
    return {"data": np.arange(block.start, block.stop)}


def counting(made):
    def make(block):
        made.append(block.start)
        return numbers(block)

    return make


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 99, 100, 101, 100_000])
def test_names_have_upstreams_digits(count):
    """ceil(log10 n) + 1."""
    blocks = blocks_of(Path("x"), count, 7)
    assert [block.start for block in blocks] == list(range(0, count, 7))
    assert blocks[-1].stop == count
    for block in blocks[:3] + blocks[-3:]:
        start, stop = block.path.stem.split("-")
        assert (int(start), int(stop)) == (block.start, block.stop)
        assert len(start) == len(stop) == math.ceil(math.log10(count)) + 1


def test_missing_and_damaged_blocks_are_made(tmp_path, capsys):
    blocks, made = blocks_of(tmp_path, 50, 10), []
    run_blocks(blocks, counting(made), "stage")
    assert made == [0, 10, 20, 30, 40]
    blocks[1].path.unlink()
    blocks[3].path.write_bytes(blocks[3].path.read_bytes()[:-8])
    made.clear()
    run_blocks(blocks, counting(made), "stage")
    assert made == [10, 30]
    assert "stage: 3 of 5 blocks exist" in capsys.readouterr().out
    for block in blocks:
        np.testing.assert_array_equal(read_array(block.path, "data"), numbers(block)["data"])


def test_the_arrays_of_one_block_are_in_memory(tmp_path):
    size, blocks = 1 << 21, blocks_of(tmp_path, 4, 1)
    tracemalloc.start()
    try:
        run_blocks(blocks, lambda block: {"data": np.zeros(size, np.uint8)}, "stage")
        assert size < tracemalloc.get_traced_memory()[1] < 1.5 * size
    finally:
        tracemalloc.stop()


def test_processes_share_what_is_missing(tmp_path, monkeypatch):
    """Every missing block is one process's, also where some are there."""
    blocks = blocks_of(tmp_path, 100, 10)
    for block in blocks[::2]:
        write_arrays(block.path, numbers(block))
    monkeypatch.setattr(module, "write_arrays", lambda path, arrays: None)
    monkeypatch.setattr(module, "barrier", lambda: None)
    shares = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        shares.append([])
        run_blocks(blocks, counting(shares[-1]), "stage")
    assert shares == [[10, 50, 90], [30, 70]]


@pytest.mark.parametrize(("share", "count"), [(0.0, 1), (0.3, 3), (1.0, 10)])
def test_validation_makes_a_share_again(tmp_path, share, count, capsys):
    blocks, made = blocks_of(tmp_path, 100, 10), []
    run_blocks(blocks, numbers, "stage")
    run_blocks(blocks, counting(made), "stage", validate=share)
    assert len(set(made)) == count
    assert f"stage: {count} of 10 blocks made again, all equal" in capsys.readouterr().out


def test_nothing_to_validate_is_no_success(tmp_path, capsys, caplog):
    """As after an index was trained, or with flags of other files."""
    run_blocks(blocks_of(tmp_path, 100, 10), numbers, "stage", validate=1.0)
    assert "equal" not in capsys.readouterr().out
    assert f"stage: nothing is compared: no block in {tmp_path}" in caplog.text


@pytest.mark.parametrize(
    "arrays",
    [
        {"data": np.arange(10) + 1},
        {"data": np.arange(10, dtype=np.int32)},
        {"data": np.arange(11)},
        {"data": np.arange(10), "more": np.arange(3)},
        {"other": np.arange(10)},
    ],
)
def test_validation_names_what_differs(tmp_path, arrays):
    (block,) = blocks_of(tmp_path, 10, 10)
    write_arrays(block.path, arrays)
    with pytest.raises(ValueError, match=r"00-10.hdf5: \w+ is not what this run computes.* delete"):
        run_blocks([block], numbers, "stage", validate=1.0)


def test_validation_finds_a_negative_zero(tmp_path):
    (block,) = blocks_of(tmp_path, 10, 10)
    write_arrays(block.path, {"data": np.zeros(10)})
    with pytest.raises(ValueError, match="data is not what"):
        run_blocks([block], lambda block: {"data": -np.zeros(10)}, "stage", validate=1.0)


def test_progress_in_a_log(tmp_path, monkeypatch, capsys):
    """A line at intervals with rate and time left, within blocks, too."""
    clock = iter(range(0, 10_000, 8))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))

    def make(block):
        block.advance(4)
        block.advance(3)
        return numbers(block)

    run_blocks(blocks_of(tmp_path, 20, 10), make, "stage", " samples")
    lines = capsys.readouterr().out.splitlines()
    told = [re.fullmatch(r"stage: (\d+) of 20 samples, \S+/s, (\S+) min left", x) for x in lines]
    assert [int(found[1]) for found in told] == [7, 14, 20]
    assert told[-1][2] == "0.0"
