"""Trackers that answer late, fail, or are not there: training neither waits nor ends."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import types

import pytest

from megatron.config.output import LoggingConfig
from megatron.features.trackers import background
from megatron.features.trackers.background import BackgroundWriter, LastingWriter
from megatron.features.trackers.services import MlflowWriter, package
from megatron.training.registry import WrittenTexts
from megatron.training.writers import build_writers


class Recorder:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.released, self.closed = threading.Event(), False

    def scalars(self, kind, step, values, *, samples, tokens):
        assert self.released.wait(60)
        self.steps.append(step)

    def texts(self, written, *, samples, tokens):
        raise RuntimeError("the server has gone away")

    def close(self):
        self.closed = True


def write(writer, *steps) -> None:
    for step in steps:
        writer.scalars("train", step, {"loss": 1.0}, samples=step, tokens=step)


def test_training_does_not_wait_for_a_slow_program():
    recorder = Recorder()
    writer = BackgroundWriter(lambda: recorder, wait=True)
    write(writer, 1, 2, 3)
    assert recorder.steps == []
    recorder.released.set()
    writer.close()
    assert (recorder.steps, recorder.closed) == ([1, 2, 3], True)


def test_a_new_run_does_not_wait_for_a_server_without_limit(monkeypatch):
    monkeypatch.setattr(background, "SECONDS_TO_OPEN", 0.01)
    answers, recorder = threading.Event(), Recorder()

    def open() -> Recorder:
        assert answers.wait(60)
        return recorder

    writer = BackgroundWriter(open, wait=True)
    write(writer, 1, 2)
    recorder.released.set()
    answers.set()
    writer.close()
    assert recorder.steps == [1, 2]


def test_the_end_of_a_run_does_not_wait_without_limit():
    recorder = Recorder()
    writer = BackgroundWriter(lambda: recorder, wait=True, seconds=0.05)
    write(writer, 1)
    with pytest.raises(TimeoutError, match="did not take the last rows"):
        writer.close()
    recorder.released.set()


def test_rows_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 2)
    recorder = Recorder()
    writer = BackgroundWriter(lambda: recorder, wait=True)
    with pytest.raises(TimeoutError, match="2 rows wait for it"):
        write(writer, *range(10))
    recorder.released.set()


def test_an_error_is_raised_by_the_next_call_and_said_once(caplog):
    opened: list[Recorder] = []

    def open(iteration: int, samples: int) -> BackgroundWriter:
        opened.append(Recorder())
        opened[-1].released.set()
        return BackgroundWriter(lambda: opened[-1], wait=True)

    writer = LastingWriter("--report-to mlflow", open)
    failing = writer._writer
    failing.texts(WrittenTexts(0, ()), samples=0, tokens=0)
    failing._thread.join(60)
    write(writer, 1, 2)
    writer.close()
    failed, missing = [record.getMessage() for record in caplog.records]
    assert failed.startswith("--report-to mlflow cannot be written (RuntimeError: the server has")
    assert "from about iteration 0 is missing there" in missing
    assert len(opened) == 1


@pytest.mark.parametrize("name", ["mlflow", "trackio", "wandb"])
def test_a_missing_package_ends_a_new_run_only(monkeypatch, caplog, name):
    monkeypatch.setitem(sys.modules, name, None)
    config = dataclasses.replace(
        LoggingConfig(), report_to=(name,), mlflow_tracking_uri="sqlite:///mlflow.db"
    )
    asked = f"--report-to {name}"
    with pytest.raises(ValueError, match=f"{asked} needs .*pip install {name}`, or leave"):
        build_writers(config)
    writer = build_writers(config, resume_iteration=5, resume_samples=5)
    for part in writer._writers:
        if isinstance(part._writer, BackgroundWriter):
            part._writer._thread.join(60)
    write(writer, 6)
    writer.close()
    failed, _ = [record.getMessage() for record in caplog.records]
    assert failed.startswith(f"{asked} cannot be written (ValueError: {asked} needs")


def test_a_store_that_does_not_open_is_said_without_its_password(monkeypatch):
    address = "mysql://mlflow:pa/ss+w0rd@db/mlflow"

    def refuse(where):
        raise RuntimeError(f"no {where}")

    fake, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    fake.MlflowClient, fake.entities = refuse, entities
    entities.Metric = entities.Param = object
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    config = dataclasses.replace(LoggingConfig(), mlflow_tracking_uri=address)
    with pytest.raises(ValueError, match=r"with mysql://\*\*\*@db/mlflow \(no mysql://") as error:
        MlflowWriter(config, {}, 0)
    assert "w0rd" not in str(error.value)


def test_the_end_of_a_run_does_not_wait_for_wandb_without_limit(monkeypatch, caplog):
    answers = threading.Event()
    run = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: answers.wait(60))
    fake = types.ModuleType("wandb")
    fake.init = lambda **_: run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = build_writers(dataclasses.replace(LoggingConfig(), report_to=("wandb",)))
    monkeypatch.setattr(background, "SECONDS_TO_CLOSE", 0.05)
    write(writer, 1)
    begun = time.monotonic()
    writer.close()
    assert time.monotonic() - begun < 30
    answers.set()
    failed, missing = [record.getMessage() for record in caplog.records]
    assert failed.startswith("--report-to wandb cannot be written (TimeoutError: it did not take")
    assert missing.startswith("--report-to wandb: what was reported from about iteration 1 is")


def test_a_folder_is_no_package(tmp_path, monkeypatch):
    """W&B makes one of its name where a run is started."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match="needs the package wandb, which is not installed"):
        package("wandb", "--report-to wandb", "leave out wandb")
    sys.modules.pop("wandb", None)
