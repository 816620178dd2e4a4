"""Samples drawn by their difficulty: within it, complete, the same whenever they are asked for."""

import json

import numpy as np
import pytest

from megatron.data.index_cache import IndexCache
from megatron.data.samples import Piece
from megatron.features.curriculum.analysis import Analysis, analyse
from megatron.features.curriculum.flags import CurriculumConfig, data_sampling
from megatron.features.curriculum.metric_files import read_rows, write_rows
from megatron.features.curriculum.order import DrawnSamples, difficulty, draw_samples

METRIC = {
    "difficulty_type": "value",
    "clustering_type": "schedule_based",
    "min_difficulty": 1,
    "max_difficulty": 10,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 20, "difficulty_step": 1},
}
IN_MEMORY = IndexCache(None)


class Samples:
    """Sample i is [its difficulty, i]."""

    def __init__(self, difficulties, shift=0):
        self.difficulties = list(difficulties)
        self.shift = shift

    def __len__(self):
        return len(self.difficulties)

    def __getitem__(self, index):
        return np.array([self.difficulties[index] + self.shift, index])

    def origin(self, index):
        return (Piece("corpus", index, 0, 2),)


def sampling(folder, samples, seed=7, epochs=1000, **changes):
    values = np.array(samples.difficulties)
    order = np.argsort(values, kind="stable")
    unique, counts = np.unique(values, return_counts=True)
    write_rows(str(folder / "samples"), order, counts)
    write_rows(str(folder / "values"), unique, np.ones_like(unique))
    metric = METRIC | changes
    metric |= {
        "index_to_sample_path": str(folder / "samples"),
        "index_to_metric_path": str(folder / "values"),
    }
    return configured({"hardness": metric}, seed, epochs)


def configured(metrics, seed=7, epochs=1000):
    learning = {"enabled": True, "curriculum_metrics": metrics}
    section = {
        "enabled": True,
        "seed": seed,
        "data_sampling": {"enabled": True, "num_epochs": epochs, "curriculum_learning": learning},
    }
    return data_sampling(CurriculumConfig(data_efficiency=json.dumps(section)))


def samples_of(drawn):
    return [drawn[i] for i in range(len(drawn))]


@pytest.mark.parametrize("seed", range(5))
def test_samples_are_within_the_difficulty_of_their_step(tmp_path, seed):
    """Batches of several sizes; some clusters are smaller than what a step takes of them."""
    rng = np.random.default_rng(seed)
    samples = Samples(rng.integers(1, 11, 40))
    config = sampling(tmp_path, samples, seed=seed)
    batches = [(4, 6), (8, 3), (16, 21)]
    drawn = draw_samples(samples, config, batches, 400, IN_MEMORY)
    assert len(drawn) == 400
    sizes = [size for size, count in batches for _ in range(count)]
    start = 0
    for step, size in enumerate(sizes, start=1):
        limit = difficulty(config.metrics[0].schedule, step)
        batch = [drawn[i] for i in range(start, min(start + size, 400))]
        assert max(value for value, _ in batch) <= limit, step
        start += size
    assert {index for _, index in samples_of(drawn)} == set(range(40)), "in the end all are drawn"


def test_one_difficulty_gives_every_sample_once_an_epoch(tmp_path):
    samples = Samples([3] * 24)
    drawn = draw_samples(
        samples, sampling(tmp_path, samples, min_difficulty=3), [(8, 1)], 72, IN_MEMORY
    )
    numbers = [int(index) for _, index in samples_of(drawn)]
    epochs = [numbers[start : start + 24] for start in (0, 24, 48)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])


def test_samples_must_be_within_every_metric(tmp_path):
    rng = np.random.default_rng(0)
    values = {name: rng.integers(1, 11, 200) for name in ("first", "second")}
    metrics = {}
    for name, actual in values.items():
        unique, counts = np.unique(actual, return_counts=True)
        write_rows(str(tmp_path / name), np.argsort(actual, kind="stable"), counts)
        write_rows(str(tmp_path / f"{name}v"), unique, np.ones_like(unique))
        metrics[name] = METRIC | {
            "min_difficulty": 4,
            "index_to_sample_path": str(tmp_path / name),
            "index_to_metric_path": str(tmp_path / f"{name}v"),
        }
    config = configured(metrics)
    drawn = draw_samples(Samples(values["first"]), config, [(10, 30)], 300, IN_MEMORY)
    for number in range(300):
        limit = difficulty(config.metrics[0].schedule, number // 10 + 1)
        index = drawn.number(number)
        assert values["first"][index] <= limit and values["second"][index] <= limit


def test_a_longer_run_begins_with_the_same_samples(tmp_path):
    samples = Samples([1, 2, 3, 4] * 10)
    config = sampling(tmp_path, samples)
    short = draw_samples(samples, config, [(4, 5)], 20, IN_MEMORY)
    longer = draw_samples(samples, config, [(4, 9)], 36, IN_MEMORY)
    beyond = draw_samples(samples, config, [(4, 5)], 36, IN_MEMORY)  # skipped samples
    expected = [longer.number(i) for i in range(36)]
    assert [short.number(i) for i in range(20)] == expected[:20]
    assert [beyond.number(i) for i in range(36)] == expected


def test_where_samples_come_from(tmp_path):
    samples = Samples([1] * 12)
    drawn = draw_samples(samples, sampling(tmp_path, samples), [(4, 3)], 12, IN_MEMORY)
    assert isinstance(drawn, DrawnSamples)
    assert [drawn.origin(i)[0].sequence for i in range(12)] == [s[1] for s in samples_of(drawn)]
    with pytest.raises(IndexError, match="sample 12 of a dataset of 12"):
        drawn[12]


def test_the_order_is_kept_and_made_again_when_it_must_be(tmp_path):
    samples, cache = Samples([1, 2, 3, 4] * 5), IndexCache(tmp_path / "cache")
    config = sampling(tmp_path, samples)

    def entries():
        return len(list((tmp_path / "cache").glob("curriculum-train-*/")))

    first = draw_samples(samples, config, [(4, 5)], 20, cache)
    draw_samples(samples, config, [(4, 5)], 20, cache)
    assert entries() == 1
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    draw_samples(samples, sampling(elsewhere, samples), [(4, 5)], 20, cache)
    assert entries() == 1, "the same files in another place"
    other = draw_samples(samples, sampling(tmp_path, samples, seed=8), [(4, 5)], 20, cache)
    assert entries() == 2 and [first.number(i) for i in range(20)] != [
        other.number(i) for i in range(20)
    ]
    draw_samples(samples, config, [(2, 10)], 20, cache)
    draw_samples(samples, sampling(tmp_path, samples, max_difficulty=4), [(4, 5)], 20, cache)
    changed = Samples([4, 3, 2, 1] * 5)
    draw_samples(changed, sampling(tmp_path, changed), [(4, 5)], 20, cache)
    assert entries() == 5


def refused(match, samples, config, wanted=8, error=ValueError):
    with pytest.raises(error, match=match):
        draw_samples(samples, config, [(4, 2)], wanted, IN_MEMORY)


def test_samples_that_cannot_be_drawn(tmp_path):
    samples = Samples([5, 6, 7, 8])
    refused(
        r"no sample has a hardness of at most 1 \(the lowest hardness is 5\).*min_difficulty",
        samples, sampling(tmp_path, samples),
    )  # fmt: skip
    easy = Samples([1] * 4)
    refused(
        "num_epochs 2 allows 8 samples, 4 an epoch; the run needs 9",
        easy, sampling(tmp_path, easy, epochs=2), wanted=9,
    )  # fmt: skip
    config = sampling(tmp_path, easy)
    refused("names sample 3 of a dataset of 3: run tools/analyze_data.py", Samples([1] * 3), config)
    write_rows(str(tmp_path / "values"), np.array([1, 2]), [1, 1])
    refused("values has 2 rows of 2 values together, .*samples 1 rows", easy, config)
    (tmp_path / "values.idx").unlink()
    refused("values.idx does not exist; tools/analyze", easy, config, error=FileNotFoundError)


def test_an_analysis_of_other_samples_is_refused(tmp_path):
    """Files of as many samples, all of them different."""
    samples = Samples([1, 2, 3, 4] * 5)
    analyse(Analysis(samples, ["seqlen"], tmp_path, 100, 8))
    folder = tmp_path / "seqlen"
    files = {
        "index_to_sample_path": str(folder / "seqlen_index_to_sample"),
        "index_to_metric_path": str(folder / "seqlen_index_to_metric"),
    }
    config = configured({"seqlen": METRIC | files})
    assert len(draw_samples(samples, config, [(4, 2)], 8, IN_MEMORY)) == 8
    refused("was made of other samples: run tools/analyze", Samples([1, 2, 3, 4] * 5, 1), config)
    (folder / "dataset.json").write_text("{")
    refused("dataset.json is damaged", samples, config)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b, i: (b[:-1], i), "cut short"),
        (lambda b, i: (b, i[:-1]), "idx is damaged"),
        (lambda b, i: (b, b"X" + i[1:]), "is not an index"),
        (lambda b, i: (b, i[:17] + b"\x09" + i[18:]), "dtype code 9"),
        (lambda b, i: (b, i[:9] + b"\x02" + i[10:]), "version 2"),
        (lambda b, i: (b, b""), "is not an index"),
    ],
)
def test_damaged_files(tmp_path, damage, message):
    path = tmp_path / "file"
    write_rows(str(path), np.arange(1000), [400, 600])
    endings = (".bin", ".idx")
    content = damage(*(path.with_suffix(ending).read_bytes() for ending in endings))
    for ending, changed in zip(endings, content, strict=True):
        path.with_suffix(ending).write_bytes(changed)
    with pytest.raises(ValueError, match=message) as caught:
        read_rows(str(path))
    assert "file." in str(caught.value)
