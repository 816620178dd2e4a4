"""A run with all its iterations is not trained, and not evaluated again where it was."""

import json

import pytest
from training_jobs import TINY, run


@pytest.fixture(scope="module")
def finished(pool, tmp_path_factory):
    """The folder and flags of a run that has ended, and what it printed."""
    save = tmp_path_factory.mktemp("finished")
    flags = [*TINY, "--eval-iters", "1", "--train-iters", "4"]
    flags += ["--save", str(save), "--load", str(save)]
    (output, error), _ = pool.run(2, run, flags)
    assert error is None, error
    return save, flags, output


def evaluations(save):
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [row["kind"] for row in rows if row["kind"] in ("validation", "test")]


def test_the_start_says_how_much_is_trained(finished):
    *_, output = finished
    assert "64 tokens a step, 256 in all" in output
    first, second = (line for line in output.splitlines() if "] step " in line)
    assert "] step 1: " in first and "lm loss 4." in first
    assert "] step 2: " in second and "; the other 2 take about 0:00:0" in second


def test_nothing_is_done_twice(pool, finished):
    save, flags, _ = finished
    assert evaluations(save) == ["validation", "test"]
    (output, error), _ = pool.run(2, run, flags)
    assert error is None, error
    said = f"nothing left to train: {save}/global_step4 has all 4 iterations; its evaluations"
    assert output.count(said) == 1
    assert "resumed" not in output and "validation loss" not in output
    assert evaluations(save) == ["validation", "test"]


@pytest.mark.proof
def test_what_is_missing_is_evaluated(pool, finished):
    """As after a kill between the last two evaluations."""
    save, flags, first = finished
    lines = (save / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] != "test"]
    (save / "metrics.jsonl").write_text("".join(kept))
    (output, error), _ = pool.run(2, run, flags)
    assert error is None, error
    assert "has all 4 iterations\n" in output
    last = [line.partition("] ")[2] for line in first.splitlines() if "on test set" in line]
    assert last and last[0] in output


@pytest.mark.proof
def test_it_is_evaluated_where_that_is_asked_for(pool, finished):
    _, flags, _ = finished
    (output, error), _ = pool.run(2, run, [*flags, "--skip-train"])
    assert error is None, error
    assert "nothing left" not in output and "validation loss at iteration 4" in output
