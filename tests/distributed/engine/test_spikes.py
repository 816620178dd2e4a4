"""Spikes of a run whose data have bad samples: warned of, gone back from, or the end."""

import contextlib
import io
import json
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from samples import sampled
from training_jobs import TINY, train

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.checkpoint.folder import KEPT, complete_tags

STEPS, EVERY, TOKENS, BAD = 60, 10, 16, (150,)
FLAGS = [flag for flag in TINY if flag != "--mock-data"] + [
    *f"--train-iters {STEPS} --save-interval {EVERY} --split 1,0,0 --spike-window 20".split(),
    *(
        "--lr-decay-style constant --seed 3 --hidden-dropout 0 "
        "--attention-dropout 0 --position-embedding-type rope"
    ).split(),
]
LAYOUTS = {
    "zero0": (1, ["--zero-stage", "0"]),
    "zero0-dp2": (2, ["--zero-stage", "0"]),
    "zero1-dp2-fp16": (2, ["--zero-stage", "1", "--fp16", "--initial-loss-scale", "65536"]),
    "zero1-dp2-async": (2, ["--zero-stage", "1", "--async-save"]),
    "zero2-dp2-bf16": (2, ["--zero-stage", "2", "--bf16"]),
    "zero3-dp2": (2, ["--zero-stage", "3"]),
    "zero1-tp2": (2, ["--zero-stage", "1", "--tensor-model-parallel-size", "2"]),
    "zero1-pp2": (2, ["--zero-stage", "1", "--pipeline-model-parallel-size", "2"]),
    "sgd": (1, ["--optimizer", "sgd", "--lr", "0.2", "--zero-stage", "1"]),
    "folders": (2, ["--checkpoint-format", "deepspeed", "--zero-stage", "1"]),
    "offloaded": (2, []),
    "ramp": (1, ["--rampup-batch-size", "2", "1", "40", "--zero-stage", "1"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents that count, which is learned at once, one of which does not."""
    prefix, rng = tmp_path_factory.mktemp("data") / "counting", np.random.default_rng(3)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for number in range(300):
            text = rng.integers(40, 99, TOKENS) if number in BAD else np.arange(TOKENS)
            writer.add_document([text])
    return ["--data-path", str(prefix)]


def spiked(argv):
    """Trains; what was printed, the error, if any, and the losses and the state at the end. For
    the pool."""
    output, record, error = io.StringIO(), None, None
    with contextlib.redirect_stdout(output):
        try:
            record = train(argv)
        except ValueError as caught:
            error = str(caught)
    return output.getvalue(), error, record


def overwritten(argv, data, rows):
    """Trains, and overwrites the data with zeros once so many rows of metrics are there. For the
    pool."""
    metrics = Path(argv[argv.index("--metrics-file") + 1])

    def overwrite():
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < rows:
            time.sleep(0.001)
        with data.open("r+b") as file:
            file.write(bytes(data.stat().st_size))

    thread = threading.Thread(target=overwrite, daemon=True)
    thread.start()
    result = spiked(argv)
    thread.join(10)
    return result


def lines(text, what):
    return [line.partition("] ")[2] for line in text.splitlines() if what in line]


def same(one, other):
    assert one.losses[-5:] == other.losses[-5:]
    assert one.state.keys() == other.state.keys()
    for name, values in one.state.items():
        np.testing.assert_array_equal(values, other.state[name], name)


def test_a_warning_names_the_samples_and_keeps_the_checkpoint_before(pool, data, tmp_path):
    save, metrics = tmp_path / "save", tmp_path / "metrics.jsonl"
    flags = [*FLAGS, *data, "--save", str(save), "--keep-last", "1"]
    ((text, error, _),) = pool.run(1, spiked, [*flags, "--metrics-file", str(metrics)])
    assert error is None
    (line,) = lines(text, "WARNING")
    found = re.fullmatch(
        r"WARNING: spike at iteration (\d+), samples (\d+) to (\d+): loss (\S+), expected (\S+) to "
        r"(\S+); global_step(\d+) is kept",
        line,
    )
    at, first, last, kept = (int(found[n]) for n in (1, 2, 3, 7))
    assert (first, last) == (4 * (at - 1), 4 * at - 1)
    assert 0 < at - kept <= EVERY and float(found[4]) > float(found[6]) > float(found[5]) > 0
    assert complete_tags(save) == [f"global_step{kept}", f"global_step{STEPS}"]
    assert json.loads((save / KEPT).read_text())["kept"] == [
        {"checkpoint": f"global_step{kept}", "iteration": at, "reason": line[9:].split(";")[0]}
    ]
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    (row,) = [row for row in rows if row["kind"] == "spike"]
    assert row["iteration"] == at and row["high"] < row["loss"]
    assert f"iteration {at + 1} is in the range again, after 1 step" in text


@pytest.mark.proof
def test_data_that_are_overwritten_with_zeros_are_a_spike_at_once(pool, tmp_path):
    prefix, metrics = tmp_path / "data", tmp_path / "metrics.jsonl"
    rng = np.random.default_rng(4)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(300):
            writer.add_document([rng.integers(1, 40) + np.arange(TOKENS)])
    flags = [*FLAGS, "--data-path", str(prefix), "--metrics-file", str(metrics)]
    flags += "--log-interval 1 --train-iters 300 --spike-window 40 --save-interval 300".split()
    flags += ["--save", str(tmp_path / "save")]
    ((text, error, _),) = pool.run(1, overwritten, flags, prefix.with_suffix(".bin"), 150)
    assert error is None
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    ordinary = max(losses[100:150])
    first = next(n for n, loss in enumerate(losses, start=1) if n > 150 and loss > 1.5 * ordinary)
    assert f"spike at iteration {first}," in lines(text, "WARNING")[0]


@pytest.mark.proof
def test_a_stop_saves_nothing_after_the_spike(pool, data, tmp_path):
    flags = [*FLAGS, *data, "--save", str(tmp_path), "--on-spike", "stop", "--save-interval", "1"]
    for _, error, _ in pool.run(2, spiked, flags):
        found = re.match(r"--on-spike stop: iteration (\d+) has loss .* nothing is saved", error)
        before = tmp_path / f"global_step{int(found[1]) - 1}"
        assert f"the last good checkpoint is {before}" in error
    assert (tmp_path / "latest").read_text() == before.name
    assert complete_tags(tmp_path)[-1] == before.name


def test_going_back_to_the_beginning_continues_the_metrics(pool, data, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    flags = [*FLAGS, *data, "--save", str(tmp_path / "save"), "--metrics-file", str(metrics)]
    flags += "--on-spike rollback --save-init --save-interval 60 --log-interval 1".split()
    ((text, error, _),) = pool.run(1, spiked, flags)
    assert error is None
    (line,) = lines(text, "rollback 1")
    assert "global_step0; skipping samples" in line
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    trained = [row["iteration"] for row in rows if row["kind"] == "train"]
    assert trained == list(range(1, STEPS + 1))
    assert [row["iteration"] for row in rows if row["kind"] == "rollback"] == [0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "save"]


@pytest.mark.parametrize(
    "layout", sampled(list(LAYOUTS), lambda layout: layout == "zero2-dp2-bf16")
)
def test_going_back_is_a_run_without_these_samples(pool, data, tmp_path, layout):
    """Bitwise, and so is a resume; metrics and later evaluations are those of such a run."""
    size, flags = LAYOUTS[layout]
    flags = [*FLAGS, *data, *flags]
    if layout == "offloaded":
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        (tmp_path / "offload.json").write_text(json.dumps({"zero_optimization": zero}))
        flags += ["--deepspeed_config", str(tmp_path / "offload.json")]
    back = [*flags, "--on-spike", "rollback"]
    where = {name: tmp_path / name for name in ("back", "fresh", "again")}
    results = pool.run(size, spiked, [*back, "--save", str(where["back"])])
    assert [error for _, error, _ in results] == [None] * size
    (line,) = lines(results[0][0], "rollback 1")
    found = re.search(r"back from iteration (\d+) to \S+/global_step(\d+); skipping samples "
                      r"(\d+:\d+), as --skip-samples (\S+) does", line)  # fmt: skip
    assert found[3] == found[4] and 0 < int(found[1]) - int(found[2]) <= EVERY
    fresh = [*flags, "--save", str(where["fresh"]), "--skip-samples", found[3]]
    for one, (text, _, other) in zip(results, pool.run(size, spiked, fresh), strict=True):
        assert not lines(text, "WARNING")
        same(one[2], other)
    tag = str(STEPS - EVERY)
    resumed = [
        *back,
        "--load",
        str(where["back"]),
        "--load-tag",
        tag,
        "--save",
        str(where["again"]),
    ]
    for one, (text, error, other) in zip(results, pool.run(size, spiked, resumed), strict=True):
        assert error is None and not lines(text, "WARNING")
        same(one[2], other)
