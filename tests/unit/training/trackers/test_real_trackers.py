"""What a run reports, read back from the files of each tracker by its own package."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config.output import LoggingConfig
from megatron.training.writers import build_writers
from megatron.training.written import WrittenText, WrittenTexts

pytestmark = pytest.mark.proof
"""Each of the packages takes seconds to import."""

FLAGS = {"tracker_project": "tests", "run_name": "small"}
CONFIGURATION = {"model": {"hidden_size": 32}, "training": {"lr": [1, 2], "long": "x" * 9000}}
TEXTS = WrittenTexts(2, (WrittenText("Once", " upon\na time", "", True),))


def write(report_to: str, **flags) -> None:
    """Two steps of a run that reaches step 4, and continues from the checkpoint of step 2."""
    config = dataclasses.replace(LoggingConfig(), report_to=(report_to,), **FLAGS, **flags)
    for first, last, offset in ((1, 4, 0.0), (3, 5, 10.0)):
        writer = build_writers(
            config,
            resume_iteration=first - 1,
            resume_samples=8 * (first - 1),
            configuration=CONFIGURATION,
        )
        if first > 1:
            writer.scalars("resume", first - 1, {}, samples=8 * (first - 1), tokens=0)
        for step in range(first, last + 1):
            samples = 8 * step
            row = {"loss": offset + step, "grad_norm": None, "mfu": 0.5, "rewards/margins": 1.0}
            writer.scalars("train", step, row, samples=samples, tokens=100 * step)
        writer.scalars("validation more", last, {"loss": 7.0}, samples=8 * last, tokens=0)
        writer.scalars("task a", last, {"bits_per_byte": 0.5}, samples=8 * last, tokens=0)
        if first == 1:
            writer.texts(TEXTS, samples=16, tokens=200)
        writer.close()


FIRST, SECOND = [(step, float(step)) for step in range(1, 5)], [(3, 13.0), (4, 14.0), (5, 15.0)]
"""The loss of the two runs by their steps."""


def test_mlflow(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    write("mlflow", mlflow_tracking_uri=uri)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("tests")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    assert [run.info.run_name for run in runs] == ["small", "small"]
    assert [run.data.tags["group"] for run in runs] == ["small", "small"]
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    assert [run.data.tags.get("resumed_at_iteration") for run in runs] == [None, "2"]
    for run, losses in zip(runs, (FIRST, SECOND), strict=True):
        history = client.get_metric_history(run.info.run_id, "lm loss")
        assert [(point.step, point.value) for point in history] == losses
        assert run.data.metrics["samples"] == 8 * losses[-1][0]
        assert run.data.metrics["lm loss validation more"] == 7.0
        assert run.data.metrics["tasks/a bits per byte"] == 0.5
        assert run.data.metrics["rewards/margins"] == 1.0
        assert run.data.params["model.hidden_size"] == "32"
        assert run.data.params["training.lr"] == "[1, 2]"
        assert len(run.data.params["training.long"]) == 500
    (file,) = client.list_artifacts(runs[0].info.run_id, "samples")
    assert file.path == "samples/iteration-2.md"
    text = Path(client.download_artifacts(runs[0].info.run_id, file.path)).read_text()
    assert "    Once\n" in text and "     upon\n    a time\n" in text
    assert (tmp_path / "new" / "mlflow-artifacts").is_dir()


def test_trackio(tmp_path):
    """In processes of their own: trackio reads where its files are when it is imported."""
    pytest.importorskip("trackio")
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "databases")}
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        environment.pop(name, None)
    here = str(Path(__file__).parent)
    program = "import test_real_trackers; test_real_trackers.write('trackio')"
    paths = [here, *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)
    read = (
        "import json, trackio\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "print('found', json.dumps([\n"
        "    (run.name, run.config, SQLiteStorage.get_logs('tests', run.name, run_id=run.id))\n"
        "    for run in trackio.Api().runs('tests')]))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", read],
        check=True,
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    ).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("found ")]
    runs = {name: (config, logs) for name, config, logs in json.loads(line[6:])}
    assert set(runs) == {"small", "small from iteration 2"}
    for name, losses in (("small", FIRST), ("small from iteration 2", SECOND)):
        config, logs = runs[name]
        assert config["model.hidden_size"] == "32"
        found = [(row["step"], row["lm loss"]) for row in logs if "lm loss" in row]
        assert found == losses
        (validation,) = [row for row in logs if "lm loss validation more" in row]
        assert validation["step"] == losses[-1][0]
    assert any("Once" in json.dumps(row.get("samples of text", "")) for row in runs["small"][1])


def test_wandb(tmp_path, monkeypatch):
    """Its files have a frame around each record, which is read here; the records are its own."""
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    write("wandb", wandb_save_dir=str(tmp_path))
    wandb.teardown()
    found = []
    for file in tmp_path.glob("wandb/offline-run-*/*.wandb"):
        records = [Record.FromString(content) for content in frames(file.read_bytes())]
        (run,) = [record.run for record in records if record.HasField("run")]
        rows = [
            {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row}
            for record in records
            if record.HasField("history") and (row := record.history.item)
        ]
        losses = [(row["_step"], row["lm loss"]) for row in rows if "lm loss" in row]
        found.append((losses, rows))
        assert (run.project, run.run_group, run.display_name) == ("tests", "small", "small")
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["model"] == {"hidden_size": 32}
        assert any(row.get("tasks/a bits per byte") == 0.5 for row in rows)
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    assert sorted(losses for losses, _ in found) == [FIRST, SECOND]


def frames(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after W&B's header of 7 bytes."""
    assert content[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    write("tensorboard", tensorboard_dir=str(tmp_path))
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    points = [(event.step, event.tensor_proto) for event in accumulator.Tensors("lm loss")]
    assert [(step, value.float_val[0]) for step, value in points] == FIRST[:2] + SECOND
