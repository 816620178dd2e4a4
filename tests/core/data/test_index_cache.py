"""The cache of built arrays: built once, atomic, checked, and in memory where it must be."""

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.data import index_cache
from megatron.data.index_cache import Blocks, IndexCache, StoredArrays


def arrays() -> dict[str, np.ndarray]:
    return {
        "a": np.arange(1000, dtype=np.uint32),
        "b": np.arange(20).reshape(10, 2),
        "empty": np.empty((0, 2), np.int64),
    }


def never() -> dict[str, np.ndarray]:
    raise AssertionError("built again")


def equal(stored: StoredArrays) -> bool:
    made = arrays()
    return set(stored) == set(made) and all(np.array_equal(stored[k], made[k]) for k in made)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


def test_builds_once_and_maps(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "new" / "folder")
    assert equal(cache.arrays("x", {"seed": 1}, arrays))
    again = cache.arrays("x", {"seed": 1}, never)
    assert equal(again)
    assert isinstance(again["a"], np.memmap)
    (entry,) = entries(tmp_path / "new" / "folder")
    assert json.loads((entry / "description.json").read_text())["depends_on"] == {"seed": 1}


def test_everything_it_depends_on_is_in_the_name(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    for depends_on in ({"seed": 1}, {"seed": 2}, {"seed": 1, "split": [0, 5]}):
        cache.arrays("x", depends_on, arrays)
    assert len(entries(tmp_path)) == 3


@pytest.mark.parametrize(
    "damage",
    ["flip", "truncate", "remove array", "remove description", "other dtype", "objects", "garbage"],
)
def test_a_damaged_entry_is_refused(damage: str, tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays("x", {}, arrays)
    (entry,) = entries(tmp_path)
    file = entry / "a.npy"
    if damage == "flip":
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1
        file.write_bytes(bytes(raw))
    elif damage == "truncate":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "remove array":
        file.unlink()
    elif damage == "remove description":
        (entry / "description.json").unlink()
    elif damage == "other dtype":
        np.save(file, np.arange(1000, dtype=np.int64))
    elif damage == "objects":  # which are pickled
        np.save(file, np.array([os.getcwd] * 1000, dtype=object), allow_pickle=True)
    else:
        file.write_bytes(b"not an array")
    with pytest.raises(ValueError, match=f"{entry} is damaged: .*delete that folder"):
        cache.arrays("x", {}, arrays)
    shutil.rmtree(entry)
    assert equal(cache.arrays("x", {}, arrays))


def test_an_unreadable_entry_is_not_built_in_memory(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays("x", {}, arrays)
    (entry,) = entries(tmp_path)
    (entry / "a.npy").unlink()
    (entry / "a.npy").mkdir()  # also fails for root, unlike permissions
    with pytest.raises(ValueError, match=f"{entry} cannot be read.*Is a directory"):
        cache.arrays("x", {}, arrays)


def test_arrays_that_come_in_blocks(tmp_path: Path) -> None:
    def build() -> Iterator[tuple[str, np.ndarray | Blocks]]:
        made = arrays()
        yield "a", Blocks(made["a"].dtype, made["a"].shape, np.split(made["a"], [10, 500, 500]))
        yield "b", Blocks(made["b"].dtype, made["b"].shape, iter([made["b"]]))
        yield "empty", Blocks(np.dtype(np.int64), (0, 2), [])

    whole = IndexCache(tmp_path / "whole").arrays("x", {}, arrays)
    in_blocks = IndexCache(tmp_path / "blocks").arrays("x", {}, build)
    assert equal(whole) and equal(in_blocks) and equal(IndexCache(None).arrays("x", {}, build))
    for name in whole:
        first, second = (
            entries(tmp_path / kind)[0] / f"{name}.npy" for kind in ("whole", "blocks")
        )
        assert first.read_bytes() == second.read_bytes()


def test_arrays_of_another_layout(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    layout = {name: (array.dtype, array.shape) for name, array in arrays().items()}
    cache.arrays("x", {}, arrays, layout)
    assert equal(cache.arrays("x", {}, never, layout))
    for other, message in (
        (layout | {"a": (np.dtype("i4"), (1000,))}, "a.npy contains uint32 .*not int32"),
        (
            layout | {"a": (np.dtype("u4"), (1001,))},
            r"a.npy contains .*not uint32 of shape \(1001,\)",
        ),
        (layout | {"c": (np.dtype("u4"), (1,))}, "c.npy is missing"),
        ({"a": layout["a"]}, "b.npy is not of this entry"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.arrays("x", {}, never, other)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    with pytest.raises(AssertionError):
        cache.arrays("x", {}, never)
    assert entries(tmp_path) == []
    assert equal(cache.arrays("x", {}, arrays))


def _build_slowly(folder: Path, log: Path, builders: int = 1) -> None:
    """Build an entry when as many processes as ``builders`` have begun to."""

    def build() -> dict[str, np.ndarray]:
        with log.open("a") as file:
            file.write("built\n")
        while log.read_text().count("built") < builders:
            time.sleep(0.01)
        time.sleep(0.5)
        return arrays()

    assert equal(IndexCache(folder).arrays("x", {}, build))


def _run_processes(folder: Path, log: Path, builders: int = 1) -> list[int | None]:
    context = multiprocessing.get_context("fork")
    args = (folder, log, builders)
    processes = [context.Process(target=_build_slowly, args=args) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    return [process.exitcode for process in processes]


def test_one_of_several_processes_builds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert _run_processes(tmp_path / "cache", log) == [0] * 5
    assert log.read_text() == "built\n"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several build, the first one publishes, all read the same."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    log = tmp_path / "log"
    assert _run_processes(tmp_path / "cache", log, builders=2) == [0] * 5
    assert log.read_text().count("built") > 1
    assert len(entries(tmp_path / "cache")) == 1


def test_waiting_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(index_cache, "_SECONDS_BEFORE_SAYING_SO", 0.05)
    context = multiprocessing.get_context("fork")
    other = context.Process(target=_build_slowly, args=(tmp_path, tmp_path / "log"))
    other.start()
    while not (tmp_path / "log").exists():
        time.sleep(0.01)
    assert equal(IndexCache(tmp_path).arrays("x", {}, never))
    assert "waiting for another process that builds x-" in caplog.text
    other.join()


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")  # also fails for root, unlike permissions
    folder = tmp_path / "file" / "cache"
    with pytest.raises(OSError, match="^--data-cache-path: cannot write.*file/cache"):
        IndexCache(folder, required=True).arrays("x", {}, arrays)
    assert equal(IndexCache(folder).arrays("x", {}, arrays))
    assert "--data-cache-path" in caplog.text


def test_in_memory_only() -> None:
    stored = IndexCache(None).arrays("x", {}, arrays)
    assert equal(stored)
    assert equal(pickle.loads(pickle.dumps(stored)))


def test_pickles_as_its_path(tmp_path: Path) -> None:
    stored = IndexCache(tmp_path).arrays("x", {}, arrays)
    pickled = pickle.dumps(stored)
    assert len(pickled) < 1000
    assert equal(pickle.loads(pickled))


def test_folder_next_to_the_data(tmp_path: Path) -> None:
    assert IndexCache.next_to(f"{tmp_path}/x", None) == IndexCache(tmp_path / "index-cache")
    for pattern in ("x-*.jsonl", "*/x.jsonl", "a*/b?/x"):
        assert IndexCache.next_to(f"{tmp_path}/{pattern}", None).folder == tmp_path / "index-cache"
    assert IndexCache.next_to("data/x", "/c") == IndexCache(Path("/c"), required=True)


def test_digest_of_a_large_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_DIGEST_BLOCK", 64)
    monkeypatch.setattr(index_cache, "_DIGEST_BLOCKS", 4)
    array = np.zeros(1000, np.uint8)
    digest = index_cache.digest_of(array)
    array[-1] = 1
    assert index_cache.digest_of(array) != digest
