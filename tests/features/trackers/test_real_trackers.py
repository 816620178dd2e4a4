"""What a run reports, read back from the files of each tracker by its own package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .reported import FIRST, SECOND, write
from .wandb_server import wandb_server

pytestmark = pytest.mark.proof
"""Each of the packages takes seconds to import."""


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
    program = "import reported; reported.write('trackio')"
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
    """`wandb sync` reads the files, and tells a server on this machine what is in them."""
    pytest.importorskip("wandb.sdk")  # a folder wandb is easily made, and importable
    import wandb

    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    write("wandb", wandb_save_dir=str(tmp_path))
    wandb.teardown()
    monkeypatch.delenv("WANDB_MODE")
    folders = sorted(tmp_path.glob("wandb/offline-run-*"))
    with wandb_server() as (address, runs):
        own = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40, "HOME": str(tmp_path)}
        for folder in folders:
            subprocess.run(
                [sys.executable, "-m", "wandb", "sync", str(folder)],
                cwd=tmp_path, env=os.environ | own, timeout=120, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
    assert len(folders) == 2
    for folder, expected in zip(folders, (FIRST, SECOND), strict=True):
        run = runs[folder.name.rpartition("-")[2]]
        rows = [run.rows[number] for number in sorted(run.rows)]
        assert [(row["_step"], row["lm loss"]) for row in rows if "lm loss" in row] == expected
        assert [row["samples"] for row in rows if "lm loss" in row] == [8 * n for n, _ in expected]
        assert rows[-1]["tasks/a bits per byte"] == 0.5
        assert rows[-1]["lm loss validation more"] == 7.0
        shown = run.described
        assert (shown["project"], shown["groupName"]) == ("tests", "small")
        assert shown["displayName"] == "small"
        configuration = json.loads(shown["config"])
        assert configuration["model"]["value"] == {"hidden_size": 32}


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    write("tensorboard", tensorboard_dir=str(tmp_path))
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    points = [(event.step, event.tensor_proto) for event in accumulator.Tensors("lm loss")]
    assert [(step, value.float_val[0]) for step, value in points] == FIRST[:2] + SECOND
