"""The JSON-lines writer, read back as JSON."""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import os
import pathlib
import re
import shutil

import pytest
from metric_rows import interval, rows, warnings, write_train

from megatron.config.output import LoggingConfig
from megatron.training import writers
from megatron.training.metrics import Evaluation
from megatron.training.writers import JsonLinesWriter, build_writers


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


def test_nothing_asked_for_writes_nothing():
    writer = build_writers(LoggingConfig())
    write_train(writer, [1])
    writer.close()


def test_a_file_that_cannot_be_written_names_its_flag(tmp_path):
    path = tmp_path / "file" / "metrics.jsonl"
    path.parent.write_text("in the way")
    config = dataclasses.replace(LoggingConfig(), metrics_file=str(path))
    with pytest.raises(ValueError, match=f"--metrics-file {re.escape(str(path))}: cannot write"):
        build_writers(config)


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
