"""Samples drawn by their difficulty, in whole runs: what is measured, then trained on."""

import json

import numpy as np
import pytest
from training_jobs import TINY

from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.data.loader import TrainingData
from megatron.engine.environment import distributed
from megatron.features.curriculum.metric_files import read_rows
from megatron.run.run import parse_run, run_data
from megatron.training import build as build_module
from tools import analyze_data

STEPS, BATCH = 8, 8
FLAGS = [
    *TINY,
    *f"--train-iters {STEPS} --global-batch-size {BATCH} --lr-warmup-iters 2".split(),
    *"--hidden-dropout 0 --attention-dropout 0 --vocab-size 3000".split(),
]
LIMITS = [1, 1, 1, 2, 2, 2, 4, 4]
"""Quarters of the samples, by rarity, that each step may draw from."""


def train_drawn(argv):
    """A run's record, and the tokens of all its batches, in the order of their making; for the
    pool."""
    run, record, seen = parse_run(None, argv), RunRecord(), []
    read = build_module.run_data

    def watched_data(run):
        datasets, collate = read(run)[:2]

        def noted(samples):
            seen.append([sample.tolist() for sample in samples])
            return collate(samples)

        return TrainingData(datasets, noted)

    build_module.run_data = watched_data
    try:
        with distributed(run.config.parallel) as mesh:
            watched_trainer(run, mesh, record.add).fit()
    finally:
        build_module.run_data = read
    return record, seen


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """Flags of a run with a curriculum, its samples, and the rarity of each."""
    folder = tmp_path_factory.mktemp("analysis")
    analyze_data.main(["--analyzing-metric", "vocab_rarity", *FLAGS, "--save", str(folder)])
    files = str(folder / "vocab_rarity" / "vocab_rarity_")
    metric = {
        "index_to_sample_path": f"{files}index_to_sample_percentile_merged",
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 1,
        "max_difficulty": 4,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 2, 4], "max_step": [3, 6]},
    }
    learning = {"enabled": True, "curriculum_metrics": {"vocab_rarity": metric}}
    section = {
        "enabled": True,
        "data_sampling": {"enabled": True, "curriculum_learning": learning},
    }
    samples = run_data(parse_run(None, FLAGS)).datasets.train
    rarity = read_rows(f"{files}sample_to_metric").values
    return [*FLAGS, "--data-efficiency", json.dumps(section)], samples, rarity


def test_every_step_is_within_its_difficulty(pool, analysed):
    flags, samples, rarity = analysed
    assert len(samples) == len(rarity) == STEPS * BATCH
    _, seen = pool.run(1, train_drawn, flags)[0]
    numbers = {tuple(samples[i].tolist()): i for i in range(len(samples))}
    assert len(numbers) == len(samples)
    found = [numbers[tuple(sample)] for batch in seen for sample in batch]
    assert len(found) == STEPS * BATCH
    easiest_first = np.argsort(rarity, kind="stable").tolist()
    for step, quarters in enumerate(LIMITS):
        batch = found[step * BATCH : (step + 1) * BATCH]
        assert set(batch) <= set(easiest_first[: len(samples) // 4 * quarters]), step


def test_ranks_and_restarts_share_one_order(pool, analysed, tmp_path):
    flags, _, _ = analysed
    whole, seen = pool.run(1, train_drawn, flags)[0]
    halves = pool.run(2, train_drawn, [*flags, "--zero-stage", "1"])
    batches = zip(halves[0][1], halves[1][1], strict=True)
    assert [sample for pair in batches for batch in pair for sample in batch] == [
        sample for batch in seen for sample in batch
    ]
    np.testing.assert_allclose(halves[0][0].losses, whole.losses, rtol=1e-5)
    save = ["--save", str(tmp_path)]
    first, before = pool.run(1, train_drawn, [*flags, *save, "--exit-interval", "5"])[0]
    second, after = pool.run(1, train_drawn, [*flags, *save, "--load", str(tmp_path)])[0]
    assert first.losses + second.losses == whole.losses
    assert before[: 5 * BATCH] + after == seen
