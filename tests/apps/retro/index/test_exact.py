"""Exact search: against distances in float64, and against faiss."""

import itertools

import numpy as np
import pytest
from samples import sampled

from megatron.apps.retro.index import exact
from megatron.apps.retro.index.exact import ExactIndex


def vectors(count: int, width: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def brute_force(queries, database, k):
    """All distances in float64, sorted; of equal ones the lower number first."""
    differences = queries[:, None].astype(np.float64) - database[None].astype(np.float64)
    distances = (differences**2).sum(-1)
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(distances, order, 1)


@pytest.mark.parametrize(
    "k, blocks",
    sampled(
        itertools.product([1, 7, 300], [(1024, 16384), (3, 50), (100, 1)]),
        lambda case: case in [(7, (1024, 16384)), (300, (3, 50)), (1, (3, 50))],
    ),
)
def test_the_nearest_are_those_of_all_distances(k, blocks, monkeypatch):
    monkeypatch.setattr(exact, "_QUERIES", blocks[0])
    monkeypatch.setattr(exact, "_VECTORS", blocks[1])
    # Far from the origin, where the products lose most digits, and with equal vectors.
    database = vectors(400) + 1000
    database[100:120] = database[7]
    index = ExactIndex(16)
    index.add(database[:150])
    index.add(database[150:])
    queries = np.concatenate([database[[7, 110, 300]], vectors(8, seed=1) + 1000])
    numbers, distances = index.search(queries, k)
    expected, theirs = brute_force(queries, database, k)
    np.testing.assert_array_equal(numbers, expected)
    np.testing.assert_allclose(distances, theirs, rtol=1e-6)
    assert numbers.dtype == np.int64 and distances.dtype == np.float32


def test_fewer_vectors_than_neighbours():
    index = ExactIndex(16)
    numbers, distances = index.search(vectors(3), 2)
    assert (numbers == -1).all() and np.isinf(distances).all()
    index.add(vectors(2))
    numbers, distances = index.search(vectors(2), 4)
    assert numbers.tolist() == [[0, 1, -1, -1], [1, 0, -1, -1]]
    assert distances[0, 0] == 0 and np.isinf(distances[:, 2:]).all()
    assert index.search(vectors(0), 4)[0].shape == (0, 4)


def test_files_are_those_of_faiss(tmp_path):
    faiss = pytest.importorskip("faiss")
    database, queries = vectors(500), vectors(20, seed=1)
    index = ExactIndex(16)
    index.add(database)
    index.save(tmp_path / "ours")
    theirs = faiss.IndexFlatL2(16)
    theirs.add(database)
    faiss.write_index(theirs, str(tmp_path / "theirs"))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    loaded = ExactIndex(16)
    loaded.load(tmp_path / "theirs")
    assert len(loaded) == 500
    numbers, distances = loaded.search(queries, 10)
    their_distances, their_numbers = theirs.search(queries, 10)
    np.testing.assert_array_equal(numbers, their_numbers)
    np.testing.assert_allclose(distances, their_distances, rtol=1e-4)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "added.faissindex"
    index = ExactIndex(16)
    index.add(vectors(10))
    index.save(path)
    with pytest.raises(ValueError, match="width 16, the embedder gives 8"):
        ExactIndex(8).load(path)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x", whole[:10]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"added\.faissindex is .*index-add"):
            index.load(path)
    path.write_bytes(b"IxPT" + whole[4:])
    with pytest.raises(ValueError, match="is not an index of the type Flat"):
        index.load(path)


def test_what_is_not_finite_is_refused():
    index = ExactIndex(16)
    index.add(vectors(10))
    with pytest.raises(ValueError, match="a query"):
        index.search(np.full((1, 16), np.nan, np.float32), 2)
    index.add(np.full((5, 16), np.inf, np.float32))
    with pytest.raises(ValueError, match="vectors 10 to 14"):
        index.search(vectors(1), 2)
    with pytest.raises(ValueError, match="width 16"):
        index.add(vectors(3, width=8))
