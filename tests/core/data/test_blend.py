"""Blends, against megatron-core's helper and against a plain loop of the rule."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data import blend
from megatron.data.blend import blend_indices, normalised_weights, part_samples

GOLDEN = Path(__file__).parents[2] / "golden" / "gpt_sample_order" / "blends.json"


def blend_by_definition(weights: list[float], size: int) -> list[tuple[int, int]]:
    taken = [0] * len(weights)
    result = []
    for i in range(size):
        behind = [w * max(i, 1) - t for w, t in zip(weights, taken, strict=True)]
        best = behind.index(max(behind))
        result.append((best, taken[best]))
        taken[best] += 1
    return result


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda c: str(c["weights"]))
def test_against_megatron_core_golden(case: dict) -> None:
    dataset, sample = blend_indices(
        normalised_weights(case["weights"], "--data-path"), len(case["dataset"])
    )
    assert dataset.tolist() == case["dataset"]
    assert sample.tolist() == case["sample"]


@pytest.mark.parametrize("compiled", [False, True])
def test_against_the_definition(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled:
        pytest.importorskip("numba")
        monkeypatch.setattr(blend, "_WORTH_COMPILING", 0)
    rng = np.random.RandomState(0)
    for parts in (1, 2, 3, 7, 20):
        weights = normalised_weights(rng.rand(parts).tolist(), "--data-path")
        dataset, sample = blend_indices(weights, 500)
        pairs = list(zip(dataset.tolist(), sample.tolist(), strict=True))
        assert pairs == blend_by_definition(weights, 500)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = blend_indices([0.25, 0.75], 1000)
    monkeypatch.setattr(blend, "_WORTH_COMPILING", 0)
    monkeypatch.setattr(blend, "find_numba", lambda: None)
    found = blend_indices([0.25, 0.75], 1000)
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_no_part_gives_more_samples_than_it_has() -> None:
    rng = np.random.RandomState(1)
    for size in (1, 2, 3, 10, 99, 1000):
        weights = normalised_weights(rng.rand(5).tolist(), "--data-path")
        dataset, _ = blend_indices(weights, size)
        taken = np.bincount(dataset, minlength=5)
        assert all(t <= part_samples(size, w) for t, w in zip(taken, weights, strict=True))


def test_part_samples() -> None:
    assert part_samples(1000, 0.5) == 503  # 502.5 up
    assert part_samples(200, 1.0) == 201
    assert part_samples(1, 0.001) == 1


@pytest.mark.parametrize("weights", [[0.0, 1.0], [-1.0, 2.0], [float("nan")], [float("inf")], []])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="--train-data-path.*above 0"):
        normalised_weights(weights, "--train-data-path")
