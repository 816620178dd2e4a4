"""Indices of faiss: what their strings mean, and what they find."""

import struct
import sys

import numpy as np
import pytest

from megatron.apps.retro.config import IndexFlags
from megatron.apps.retro.index import build_index
from megatron.apps.retro.index.exact import ExactIndex
from megatron.apps.retro.index.notation import fitting_index, index_parts, training_chunks
from megatron.config import ConfigError

WIDTH, COUNT = 16, 900
STRINGS = ["IVF16,Flat", "IVF16_HNSW8,Flat", "OPQ4_8,IVF16_HNSW8,PQ4x3", "PQ4x4"]


def vectors(count: int = COUNT, seed: int = 0) -> np.ndarray:
    """Vectors around 40 centres."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(9).normal(size=(40, WIDTH))
    rows = centres[rng.integers(0, 40, count)] + rng.normal(size=(count, WIDTH))
    return rows.astype(np.float32)


def trained(text: str, **flags):
    index = build_index(IndexFlags(retro_index_str=text, **flags), COUNT, WIDTH)
    index.train(vectors())
    return index


@pytest.mark.parametrize("text", STRINGS)
def test_codes_add_what_vectors_add(text, tmp_path):
    pytest.importorskip("faiss")
    by_vectors, by_codes = trained(text), trained(text)
    by_vectors.add(vectors())
    codes = by_codes.encode(vectors())
    assert codes.dtype == np.uint8
    for start in range(0, COUNT, 300):
        by_codes.add_codes(codes[start : start + 300])
    by_vectors.save(tmp_path / "vectors")
    by_codes.save(tmp_path / "codes")
    assert (tmp_path / "vectors").read_bytes() == (tmp_path / "codes").read_bytes()
    loaded = build_index(IndexFlags(retro_index_str=text), COUNT, WIDTH)
    loaded.load(tmp_path / "codes")
    assert len(loaded) == COUNT
    assert loaded.holds(250, codes[250:600])
    wrong = codes.copy()
    wrong[400] = codes[(codes != codes[400]).any(1).argmax()]
    assert not loaded.holds(250, wrong[250:600])
    assert not loaded.holds(600, codes[600:][::-1])
    assert not loaded.holds(COUNT - 1, codes[-2:])
    queries = vectors(30, seed=1)
    for found, expected in zip(
        loaded.search(queries, 5), by_vectors.search(queries, 5), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "text, least",
    [
        ("IVF16,Flat", 1),
        ("IVF16_HNSW8,Flat", 1),
        pytest.param("OPQ4,IVF16,PQ8x5", 0.4, marks=pytest.mark.proof),
    ],
)
def test_what_is_found_in_all_clusters(text, least):
    """Without codes the exact neighbours, with them most."""
    pytest.importorskip("faiss")
    index, exact = trained(text, retro_query_nprobe=16), ExactIndex(WIDTH)
    queries = vectors(50, seed=1)
    index.add(vectors())
    exact.add(vectors())
    found, distances = index.search(queries, 10)
    expected, exact_distances = exact.search(queries, 10)
    hits = (found[:, :, None] == expected[:, None]).any(2).mean()
    assert hits >= least
    assert (np.diff(distances) >= 0).all()
    if least == 1:
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(distances, exact_distances, rtol=1e-4)


def test_more_probes_find_more():
    pytest.importorskip("faiss")
    exact = ExactIndex(WIDTH)
    exact.add(vectors())
    expected, _ = exact.search(vectors(50, seed=1), 10)
    hits = []
    for probes in (1, 4, 16):
        index = trained("IVF16,Flat", retro_query_nprobe=probes)
        index.add(vectors())
        found, _ = index.search(vectors(50, seed=1), 10)
        hits.append((found[:, :, None] == expected[:, None]).any(2).mean())
    assert 0 < hits[0] < hits[1] < hits[2] == 1


def test_fewer_than_asked_for():
    pytest.importorskip("faiss")
    index = trained("IVF16,Flat", retro_query_nprobe=16)
    index.add(vectors(3))
    numbers, distances = index.search(vectors(2), 5)
    assert sorted(numbers[0, :3]) == [0, 1, 2] and (numbers[:, 3:] == -1).all()
    assert np.isinf(distances[:, 3:]).all()


@pytest.mark.parametrize(
    "text, message",
    [
        ("HNSW32", "HNSW32 is not known; known are Flat"),
        ("IVF0,Flat", "a number that is 0"),
        ("OPQ3_8,IVF16,PQ4", "OPQ3 does not divide the 8"),
        ("IVF16,PQ5", "PQ5 does not divide the 16"),
        ("OPQ4_32,PQ4", "vectors have 16 elements, not 32"),
        ("PQ4x20", "codes of 20 bits"),
    ],
)
def test_strings_that_cannot_be(text, message):
    with pytest.raises(ConfigError, match=f"--retro-index-str.*{message}"):
        index_parts(IndexFlags(retro_index_str=text), COUNT, WIDTH)


def test_too_few_to_learn_from():
    pytest.importorskip("faiss")
    index = build_index(IndexFlags(retro_index_str="IVF64,PQ4x4"), COUNT, WIDTH)
    with pytest.raises(ValueError, match=r"IVF64,PQ4x4 learns from at least 64 chunks and gets 63"):
        index.train(vectors(63))


def test_vectors_that_are_not_finite():
    pytest.importorskip("faiss")
    index = trained("IVF16,Flat")
    with pytest.raises(ValueError, match="not finite"):
        index.add(np.full((2, WIDTH), np.nan, np.float32))


def test_damaged_files(tmp_path):
    pytest.importorskip("faiss")
    index, path = trained("IVF16,Flat"), tmp_path / "x.faissindex"
    index.save(path)
    with pytest.raises(ValueError, match="width 16, the embedder gives 8"):
        build_index(IndexFlags(retro_index_str="IVF16,Flat"), COUNT, 8).load(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"x\.faissindex is damaged"):
        index.load(path)
    with pytest.raises(OSError, match=r"missing.x\.faissindex cannot be written"):
        index.save(tmp_path / "missing" / "x.faissindex")


def test_without_faiss(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert isinstance(build_index(IndexFlags(), COUNT, WIDTH), ExactIndex)
    with pytest.raises(ConfigError, match=r"IVF16,Flat needs faiss: pip install faiss-cpu"):
        build_index(IndexFlags(retro_index_str="IVF16,Flat"), COUNT, WIDTH)


@pytest.mark.parametrize(
    "count, text",
    [
        (100_000, "Flat"),
        (100_001, "IVF1024,Flat"),
        (10**6, "IVF4096,Flat"),
        (10**6 + 1, "IVF65536_HNSW32,Flat"),
        (10**7 + 1, "OPQ32_256,IVF262144_HNSW32,PQ32"),
        (10**9, "OPQ32_256,IVF1048576_HNSW32,PQ32"),
        (10**10, "OPQ32_256,IVF4194304_HNSW32,PQ32"),
    ],
)
def test_the_index_of_a_corpus(count, text):
    assert fitting_index(count, 1024) == text
    parts = index_parts(IndexFlags(), count, 1024)
    assert parts.is_exact == (text == "Flat")
    assert parts.probes(IndexFlags(retro_query_nprobe=10**9)) == (parts.clusters or 1)
    assert 65536 <= training_chunks(IndexFlags(), count, 1024) <= count


@pytest.mark.parametrize("width", [1, 48, 100, 256, 384, 768])
def test_the_index_of_a_large_corpus_fits_any_width(width):
    assert index_parts(IndexFlags(), 10**8, width).text.startswith("OPQ")


@pytest.mark.parametrize(
    ("rows", "message"), [(2**62, "4,611,686,018,427,387,904 vectors"), (-1, "-1 vectors")]
)
def test_a_file_that_claims_more_vectors_than_it_has_bytes(rows, message, tmp_path):
    pytest.importorskip("faiss")
    path = tmp_path / "added.faissindex"
    path.write_bytes(struct.pack("<4siq", b"IxF2", WIDTH, rows) + bytes(100))
    with pytest.raises(ValueError, match=f"added.faissindex is damaged.*{message}"):
        build_index(IndexFlags(retro_index_str="IVF16,Flat"), COUNT, WIDTH).load(path)


def test_lists_in_another_file(tmp_path):
    """faiss opens whatever file such an index names."""
    faiss = pytest.importorskip("faiss")
    index = faiss.index_factory(WIDTH, "IVF1,Flat")
    vectors = np.random.default_rng(1).random((50, WIDTH), np.float32)
    index.train(vectors)
    lists = faiss.OnDiskInvertedLists(1, index.code_size, str(tmp_path / "elsewhere"))
    index.replace_invlists(lists)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "added.faissindex"))
    with pytest.raises(ValueError, match="added.faissindex keeps its lists in another file"):
        build_index(IndexFlags(retro_index_str="IVF16,Flat"), COUNT, WIDTH).load(
            tmp_path / "added.faissindex"
        )
