"""Writers read back: JSON lines as JSON, events through TensorBoard's own accumulator."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import pathlib
import shutil
import sys
import types

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from megatron.config.output import LoggingConfig
from megatron.features.trackers.tags import TAGS, tagged
from megatron.features.trackers.tensorboard import TensorBoardWriter
from megatron.features.trackers.wandb import WandbWriter
from megatron.training import writers
from megatron.training.metrics import Evaluation
from megatron.training.registry import METRICS, IntervalMetrics
from megatron.training.writers import (
    STEP,
    JsonLinesWriter,
    LastingWriter,
    TeeWriter,
    build_writers,
)


def interval(iteration: int, loss: float = 2.0) -> IntervalMetrics:
    values = dict.fromkeys(METRICS, 1.0)
    for name in ("seq_length", "trained_tokens_per_second"):
        del values[name]
    values |= {"loss": loss, "samples_per_second": 32.0, "tokens_per_second_per_device": 4096.0}
    values |= {"seconds_per_iteration": 0.5, "memory_allocated_bytes": 2**30}
    values |= dict.fromkeys(["grad_norm", "mfu", "hfu", "memory_reserved_bytes"])
    clock = iteration, 100, 16 * iteration, 2048 * iteration
    return IntervalMetrics(*clock, 1, {"lm loss": loss}, values, METRICS)


def write_train(writer, iterations, loss=2.0) -> None:
    for iteration in iterations:
        row = interval(iteration, loss).row()
        writer.scalars("train", iteration, row, samples=16 * iteration, tokens=2048 * iteration)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# JSON lines


def test_row_has_kind_clock_and_values(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    write_train(writer, [3])
    writer.scalars("validation", 3, Evaluation(3, {"lm loss": 1.0}).row(), samples=48, tokens=6144)
    # Whole before close: a killed run keeps its rows.
    train, validation = rows(path)
    clock = {"iteration": 3, "consumed_samples": 48, "consumed_tokens": 6144}
    assert train == {"kind": "train", **clock, **interval(3).row()}
    assert validation == {
        "kind": "validation",
        **clock,
        "loss": 1.0,
        "perplexity": pytest.approx(math.e),
    }
    writer.close()


def test_what_a_run_reports_beside_its_losses_has_tags():
    values = {"loss": 1.0, "dpo loss": 1.0, "rewards/margins": 2.0, "lm loss PPL": 3.0, "mfu": 0.5}
    assert dict(tagged("train", values)) == {
        "loss": 1.0, "dpo loss": 1.0, "rewards/margins": 2.0, "mfu": 0.5,
    }  # fmt: skip
    assert dict(tagged("train", {"queue_seconds": 1.5, "nan_steps": 0})) == {"queue-seconds": 1.5}
    assert dict(tagged("validation more", values)) == {
        "loss validation more": 1.0,
        "dpo loss validation more": 1.0,
        "rewards/margins validation more": 2.0,
    }


def test_nan_and_infinity_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.scalars("train", 1, {"loss": math.nan, "grad_norm": math.inf}, samples=1, tokens=1)
    writer.close()
    assert rows(path)[0]["loss"] is None
    assert rows(path)[0]["grad_norm"] is None


def test_resumed_file_has_one_row_per_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first, last, loss in ((1, 8, 1.0), (6, 9, 2.0), (6, 10, 3.0)):
        writer = JsonLinesWriter(path, resume_iteration=first - 1)
        if first > 1:
            writer.scalars("resume", first - 1, {}, samples=0, tokens=0)
        write_train(writer, range(first, last + 1), loss)
        writer.close()
    train = [row for row in rows(path) if row["kind"] == "train"]
    assert [row["iteration"] for row in train] == list(range(1, 11))
    assert [row["loss"] for row in train] == [1.0] * 5 + [3.0] * 5
    assert [row["iteration"] for row in rows(path) if row["kind"] == "resume"] == [5]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_torn_last_line_is_dropped_on_resume_and_said(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    write_train(writer, [1, 2])
    writer.close()
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "itera')
    with caplog.at_level(logging.WARNING):
        writer = JsonLinesWriter(path, resume_iteration=2)
    write_train(writer, [3])
    writer.close()
    assert [row["iteration"] for row in rows(path)] == [1, 2, 3]
    assert "broken line 3" in caplog.text


def test_last_line_without_newline_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    write_train(writer, [1])
    writer.close()
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    writer = JsonLinesWriter(path, resume_iteration=1)
    write_train(writer, [2])
    writer.close()
    assert [row["iteration"] for row in rows(path)] == [1, 2]


def test_fresh_run_moves_the_old_file_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for loss in (1.0, 2.0, 3.0):
        writer = JsonLinesWriter(path)
        write_train(writer, [1], loss)
        writer.close()
    names = ("metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.2")
    assert [rows(tmp_path / name)[0]["loss"] for name in names] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("iteration", [0, 2])
@pytest.mark.parametrize("content", [b'{\n  "files": {}\n}\n', b"\x88\x01\n\0" * 100_000])
def test_a_file_of_something_else_is_not_touched(tmp_path, iteration, content):
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="--metrics-file .*manifest.json: .* name another"):
        JsonLinesWriter(path, resume_iteration=iteration)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b'{"ki', b"\0" * 50, b'oops\n{"kind": "train", "iter'])
def test_a_file_that_was_only_begun_is_continued(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    writer = JsonLinesWriter(path, resume_iteration=2)
    write_train(writer, [3])
    writer.close()
    assert [row["iteration"] for row in rows(path)] == [3]


# TensorBoard


def events(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.tensor_proto.float_val[0]) for event in accumulator.Tensors(tag)]
        for tag in accumulator.Tags()["tensors"]
    }


def tensorboard_config(tmp_path, **changes) -> LoggingConfig:
    return dataclasses.replace(LoggingConfig(), tensorboard_dir=str(tmp_path / "tb"), **changes)


def test_resumed_curves_are_not_doubled(tmp_path, monkeypatch):
    # Files of one second are ordered by this count as text; runs of one process go past 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    logging = tensorboard_config(tmp_path)
    for first, last, loss in ((1, 8, 1.0), (6, 9, 2.0), (8, 10, 3.0)):
        writer = TensorBoardWriter(logging, first - 1, 16 * (first - 1))
        write_train(writer, range(first, last + 1), loss)
        writer.close()
    losses = [1.0] * 5 + [2.0] * 2 + [3.0] * 3
    assert events(tmp_path / "tb")["lm loss"] == list(zip(range(1, 11), losses, strict=True))
    assert events(tmp_path / "tb" / "vs_samples")["lm loss vs samples"] == list(
        zip(range(16, 176, 16), losses, strict=True)
    )


def test_tags_are_megatrons_and_follow_the_flags(tmp_path):
    def tags(name, **flags):
        logging = tensorboard_config(tmp_path / name, **flags)
        writer = TensorBoardWriter(logging)
        write_train(writer, [1])
        writer.scalars("validation", 1, Evaluation(1, {"lm loss": 1.0}).row(), samples=16, tokens=1)
        writer.scalars("resume", 1, {}, samples=16, tokens=1)
        writer.close()
        return set(events(tmp_path / name / "tb"))

    throughput = {"samples-per-second", "tokens-per-second-per-device", "throughput"}
    ranks = {
        "slowest-rank",
        *(f"own-time-{name}-rank" for name in ("slowest", "median", "fastest")),
    }
    spent = {"energy-joules", "co2-grams", "cost", "cost-left", "seconds-left"}
    always = {"lm loss", "lm loss validation", "weight-decay", "num-zeros", "params-norm"}
    always |= {"lm-loss-validation/lm loss validation"} | throughput | ranks | spent
    assert tags("default") == always | {"learning-rate", "loss-scale"}
    assert tags(
        "other",
        log_learning_rate_to_tensorboard=False,
        log_loss_scale_to_tensorboard=False,
        log_batch_size_to_tensorboard=True,
        log_timers_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
        log_memory_to_tensorboard=True,
    ) == always | {
        "batch-size",
        "iteration-time",
        "iteration-time/iteration-time",
        "lm loss validation ppl",
        "lm-loss-validation/lm loss validation ppl",
        "mem-max-allocated-bytes",
    }


def test_points_of_steps_over_three_axes(tmp_path):
    """As Megatron-DeepSpeed writes them; a resume drops later ones over each axis."""
    values = {
        "lm-loss-training/lm loss": 2.0,
        "optimizer/weight_l2": 3.0,
        "mem-reserved-bytes": 4.0,
    }
    for first in (0, 1):
        writer = TensorBoardWriter(tensorboard_config(tmp_path), first, 16 * first)
        if first:
            writer.scalars("resume", first, {}, samples=16 * first, tokens=256 * first)
        for step in range(first + 1, 4):
            writer.scalars(STEP, step, values, samples=16 * step, tokens=256 * step)
        writer.close()
    tensorboard = tmp_path / "tb"
    written = (
        events(tensorboard),
        events(tensorboard / "vs_samples"),
        events(tensorboard / "vs_tokens"),
    )
    axes = [(1, 2, 3), (16, 32, 48), (256, 512, 768)]
    steps, samples, tokens = ([float(at) for at in axis] for axis in axes)
    expected = (
        {
            "steps-vs-samples/y=samples,x=steps": samples,
            "steps-vs-tokens/y=tokens,x=steps": tokens,
            **{tag: [value] * 3 for tag, value in values.items()},
        },
        {
            "steps-vs-samples/y=steps,x=samples": steps,
            "lm-loss-training/lm loss vs samples": [2.0] * 3,
        },
        {
            "steps-vs-tokens/y=steps,x=tokens": steps,
            "lm-loss-training/lm loss vs tokens": [2.0] * 3,
            "optimizer/weight_l2 vs tokens": [3.0] * 3,
        },
    )
    for axis, tags, there in zip(axes, expected, written, strict=True):
        assert there == {tag: list(zip(axis, y, strict=True)) for tag, y in tags.items()}


def test_other_writers_take_no_points(tmp_path):
    writer = JsonLinesWriter(tmp_path / "m.jsonl")
    writer.scalars(STEP, 1, {"lm-loss-training/lm loss": 2.0}, samples=1, tokens=1)
    writer.close()
    assert rows(tmp_path / "m.jsonl") == [] == list(tagged(STEP, {"lm-loss-training/lm loss": 2.0}))


def test_tensorboard_interval_thins_training_and_not_validation(tmp_path):
    writer = TensorBoardWriter(tensorboard_config(tmp_path, tensorboard_log_interval=3))
    write_train(writer, range(1, 8))
    writer.scalars("validation", 7, {"loss": 1.0}, samples=1, tokens=1)
    writer.close()
    found = events(tmp_path / "tb")
    assert [step for step, _ in found["lm loss"]] == [3, 6]
    assert [step for step, _ in found["lm loss validation"]] == [7]


def test_losses_of_their_own_name_have_tags_of_it(tmp_path):
    writer = TensorBoardWriter(tensorboard_config(tmp_path))
    values = {"loss": 5.0, "lm loss": 4.0, "sop loss": 1.0}
    for kind in ("train", "validation"):
        writer.scalars(kind, 1, values, samples=1, tokens=1)
    writer.close()
    found = {tag: points[0][1] for tag, points in events(tmp_path / "tb").items()}
    expected = {"loss": 5.0, "lm loss": 4.0, "sop loss": 1.0}
    expected |= {f"{tag} validation": value for tag, value in expected.items()}
    assert found.items() >= expected.items()


def test_tasks_have_a_group_of_tags(tmp_path):
    """And what is left out of validation is not left out of them."""
    logging = tensorboard_config(tmp_path)
    writers = TeeWriter([JsonLinesWriter(tmp_path / "m.jsonl"), TensorBoardWriter(logging)])
    values = {"perplexity": 2.0, "bits_per_byte": 0.5, "other": None}
    writers.scalars("task wikitext", 3, values, samples=6, tokens=12)
    writers.close()
    clock = {"iteration": 3, "consumed_samples": 6, "consumed_tokens": 12}
    assert rows(tmp_path / "m.jsonl") == [{"kind": "task wikitext", **clock, **values}]
    assert events(tmp_path / "tb") == {
        "tasks/wikitext perplexity": [(3, 2.0)],
        "tasks/wikitext bits per byte": [(3, 0.5)],
    }


def test_every_tag_belongs_to_a_value_that_is_reported():
    assert set(TAGS["train"]) <= set(interval(1).row())
    for kind in ("validation", "test"):
        assert set(TAGS[kind]) == set(Evaluation(1, {"lm loss": 1.0}).row())


# Weights & Biases


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict]] = []
        self.finished = False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_gets_flags_configuration_and_tags(monkeypatch, tmp_path):
    run, given = FakeRun(), {}

    def init(**arguments):
        given.update(arguments)
        return run

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = tmp_path / "wandb files"
    config = dataclasses.replace(
        LoggingConfig(),
        wandb_project="gpt",
        wandb_exp_name="first",
        wandb_save_dir=str(folder),
        wandb_entity="us",
    )
    writer = build_writers(config, configuration={"lr": 1.0})
    writer.scalars("train", 4, {"loss": 2.0, "grad_norm": None}, samples=8, tokens=9)
    writer.scalars("resume", 4, {}, samples=8, tokens=9)
    writer.close()
    assert given == {
        "project": "gpt",
        "entity": "us",
        "name": "first",
        "group": "first",
        "dir": str(folder),
        "config": {"lr": 1.0},
    }
    assert folder.is_dir()
    axes = {"samples": 8, "tokens": 9}
    assert run.logged == [(4, {"lm loss": 2.0, "loss/lm loss": 2.0, **axes})]
    assert run.finished


def test_wandb_gets_megatron_deepspeeds_keys(monkeypatch):
    """Rates over all devices, of a device, and divided by the number of replicas."""
    run, fake = FakeRun(), types.ModuleType("wandb")
    fake.init = lambda **_: run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    parallel = {"world_size": 8, "data_parallel_size": 4}
    write_train(WandbWriter(LoggingConfig(), {"parallel": parallel}), [1])
    (_, logged), *_ = run.logged
    keys = {
        name.partition("/")[2]: value for name, value in logged.items() if "throughput/" in name
    }
    assert keys == {
        "samples_per_sec": 32.0, "samples_per_sec_per_replica": 8.0,
        "tokens_per_sec": 32768.0, "tokens_per_sec_per_replica": 8192.0,
        "tokens_per_gpu_per_sec": 4096.0, "tokens_per_gpu_per_sec_per_replica": 1024.0,
        "iteration-time": 0.5, "elapsed_ms_per_iteration": 500.0, "tflops": 1.0,
    }  # fmt: skip
    assert logged["loss/lm loss"] == 2.0


def test_missing_wandb_names_package_and_flags(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = dataclasses.replace(LoggingConfig(), wandb_project="gpt")
    with pytest.raises(ValueError, match=r"--wandb-project gpt .*pip install wandb"):
        WandbWriter(config)


# Together


def test_nothing_asked_for_writes_nothing():
    writer = build_writers(LoggingConfig())
    write_train(writer, [1])
    writer.close()


def test_all_that_is_asked_for_gets_the_values(tmp_path):
    config = tensorboard_config(tmp_path, metrics_file=str(tmp_path / "metrics.jsonl"))
    writer = build_writers(config, resume_iteration=0)
    write_train(writer, [1, 2])
    writer.close()
    assert len(rows(tmp_path / "metrics.jsonl")) == 2
    assert len(events(tmp_path / "tb")["lm loss"]) == 2


# Writers that fail


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_full_disk_does_not_end_a_run(caplog):
    """The rows are said to be missing at the end."""
    writer = JsonLinesWriter(pathlib.Path("/dev/full"))
    write_train(writer, [1, 2, 3])
    writer.close()
    waiting, missing = warnings(caplog)
    assert waiting.startswith("/dev/full: No space left on device; training continues")
    assert missing == "/dev/full: 3 rows are missing"


def test_rows_wait_for_space(tmp_path, caplog):
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    write_train(writer, [1])
    with open("/dev/full", "ab", buffering=0) as full:
        whole, writer._file = writer._file, full
        write_train(writer, [2, 3])
    writer._file = whole
    write_train(writer, [4])
    writer.close()
    assert [row["iteration"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert len(warnings(caplog)) == 1


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("back_to", [0, 3])
def test_going_back_drops_later_rows_of_the_same_file(tmp_path, back_to):
    path = tmp_path / "metrics.jsonl"
    writer = build_writers(dataclasses.replace(LoggingConfig(), metrics_file=str(path)))
    writer.scalars("save", 0, {}, samples=0, tokens=0)
    write_train(writer, range(1, 6), 1.0)
    writer.went_back(back_to, 16 * back_to)
    write_train(writer, range(back_to + 1, 8), 2.0)
    writer.close()
    assert [row["iteration"] for row in rows(path)] == list(range(8))
    losses = [row["loss"] for row in rows(path)[1:]]
    assert losses == [1.0] * back_to + [2.0] * (7 - back_to)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("resumed", [False, True])
def test_rows_stay_where_a_full_disk_has_no_space_for_a_copy(
    tmp_path, monkeypatch, caplog, resumed
):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    write_train(writer, range(1, 6), 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(writers, "sync", full_disk)
        if resumed:
            writer.close()
            writer = JsonLinesWriter(path, resume_iteration=3)
        else:
            writer.went_back(3, 48)
    write_train(writer, [4, 5], 2.0)
    writer.close()
    assert [row["iteration"] for row in rows(path)] == [1, 2, 3, 4, 5, 4, 5]
    assert warnings(caplog) == [
        f"{path}: rows past iteration 3 cannot be dropped (No space left on device): they stay, "
        "and the new ones follow after them"
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_going_back_while_rows_wait_loses_none(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    write_train(writer, [1, 2])
    with open("/dev/full", "ab", buffering=0) as full:
        whole, writer._file = writer._file, full
        write_train(writer, [3])
        writer.went_back(1, 16)
    writer._file = whole
    write_train(writer, [2])
    writer.close()
    assert [row["iteration"] for row in rows(path)] == [1, 2, 3, 2]
    waiting, stay = warnings(caplog)
    assert "the rows wait in memory" in waiting and "past iteration 1 cannot be dropped" in stay


class Lines:
    """A tracker's writer, which may fail."""

    def __init__(self, lines: list, fails_to_close: bool = False) -> None:
        self.lines, self.fails_to_close = lines, fails_to_close

    def scalars(self, kind, step, values, *, samples, tokens):
        self.lines.append(step)

    def close(self):
        if self.fails_to_close:
            raise TimeoutError("it did not take the last rows")


@pytest.mark.parametrize("back_to", [0, 3])
def test_a_tracker_begins_again_after_going_back(caplog, back_to):
    opened, lines = [], []

    def open_one(iteration, samples):
        opened.append((iteration, samples))
        return Lines(lines)

    writer = LastingWriter("--report-to some", open_one)
    write_train(writer, [1, 2, 3, 4])
    writer.went_back(back_to, 16 * back_to)
    write_train(writer, [back_to + 1])
    writer.close()
    assert opened == [(0, 0), (back_to, 16 * back_to)]
    assert lines == [1, 2, 3, 4, back_to + 1] and warnings(caplog) == []


@pytest.mark.parametrize("back_to", [0, 3])
@pytest.mark.parametrize("broken", ["open", "close"])
def test_a_tracker_that_fails_at_going_back_does_not_end_a_run(caplog, back_to, broken):
    opened, lines, seconds = [], [], [0.0]

    def open_one(iteration, samples):
        opened.append((iteration, samples))
        if broken == "open" and len(opened) == 2:
            raise ValueError("the server does not answer")
        return Lines(lines, fails_to_close=broken == "close" and len(opened) == 1)

    writer = LastingWriter("--report-to some", open_one, clock=lambda: seconds[0])
    write_train(writer, [1, 2, 3, 4])
    writer.went_back(back_to, 16 * back_to)
    write_train(writer, [back_to + 1])
    seconds[0] = 61.0
    write_train(writer, [back_to + 2])
    writer.close()
    kept = [back_to + 2] if broken == "open" else [back_to + 1, back_to + 2]
    assert lines == [1, 2, 3, 4, *kept]
    failed, again, missing = warnings(caplog)
    assert failed.startswith("--report-to some cannot be written (")
    assert again == (
        "--report-to some is written again from iteration "
        f"{back_to + 2 if broken == 'open' else back_to} on"
    )
    assert "is missing there" in missing


def test_a_deleted_folder_is_made_again(tmp_path, caplog):
    path = tmp_path / "save" / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    write_train(writer, [1])
    shutil.rmtree(path.parent)
    write_train(writer, [2])
    writer.close()
    assert [row["iteration"] for row in rows(path)] == [2]
    assert warnings(caplog) == [f"{path} was deleted while it was written: a new one begins here"]


def test_a_device_or_pipe_is_not_set_aside(tmp_path):
    """As root that would rename /dev/null."""
    path = tmp_path / "null"
    path.symlink_to("/dev/null")
    writer = JsonLinesWriter(path)
    write_train(writer, [1])
    writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["null"]


def test_a_hostile_row_is_dropped_on_resume(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    bad = ["[" * 100_000, '{"kind": "train", "iteration": "x"}', '{"kind": 1, "iteration": 1e400}']
    path.write_text("\n".join([*bad, '{"kind": "train", "iteration": 1}', ""]))
    JsonLinesWriter(path, resume_iteration=2).close()
    assert rows(path) == [{"kind": "train", "iteration": 1}]
    assert len(warnings(caplog)) == 3


@pytest.mark.filterwarnings("error")
def test_tensorboard_continues_after_its_folder_was_deleted(tmp_path, caplog, capfd):
    """One line for the failure, without a traceback of its thread, one where it is written again,
    and one at the end."""
    seconds = [0.0]
    config = tensorboard_config(tmp_path, tensorboard_queue_size=1)
    writer = LastingWriter(
        "--tensorboard-dir tb",
        lambda iteration, samples: TensorBoardWriter(config, iteration, samples),
        clock=lambda: seconds[0],
    )
    shutil.rmtree(tmp_path / "tb")
    for iteration in range(1, 200):
        write_train(writer, [iteration])
        writer_failed = writer._writer is None
        if writer_failed:
            break
        for part in (writer._writer._by_iteration, writer._writer._by_samples):
            with contextlib.suppress(OSError):
                part.flush()
    assert writer_failed
    write_train(writer, [iteration + 1])  # too early for another attempt
    seconds[0] = 61.0
    write_train(writer, [iteration + 2, iteration + 3])
    writer.close()
    # The thread may have begun its file after the folder was deleted: what was first is there then.
    steps = [step for step, _ in events(tmp_path / "tb")["lm loss"]]
    assert steps[-2:] == [iteration + 2, iteration + 3]
    failed, again, missing = warnings(caplog)
    assert failed.startswith("--tensorboard-dir tb cannot be written (No such file or directory)")
    assert again == f"--tensorboard-dir tb is written again from iteration {iteration + 2} on"
    assert missing.startswith("--tensorboard-dir tb: what was reported from about iteration")
    # Not "Traceback": the log may go to the closed stream of another test, which logging reports.
    assert "Exception in thread" not in capfd.readouterr().err


def test_wandb_that_fails_is_said_once(monkeypatch, caplog):
    class Broken(FakeRun):
        def log(self, values, step):
            raise RuntimeError("the service is gone")

    fake = types.ModuleType("wandb")
    fake.init = lambda **arguments: Broken()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = build_writers(dataclasses.replace(LoggingConfig(), wandb_project="gpt"))
    write_train(writer, [1, 2, 3])
    writer.close()
    failed, missing = warnings(caplog)
    assert failed.startswith("--wandb-project gpt cannot be written (RuntimeError: the service is")
    assert "from about iteration 0 is missing" in missing


def test_wandb_that_does_not_start_is_a_line_for_users(monkeypatch):
    def init(**arguments):
        raise RuntimeError("api_key not configured")

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ValueError, match="--wandb-project gpt: .*api_key.*WANDB_MODE=offline"):
        WandbWriter(dataclasses.replace(LoggingConfig(), wandb_project="gpt"))
