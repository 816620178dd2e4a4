"""Runs that report to every tracker, as people start them: without a network, and to a server that
does not answer."""

import json
import socket
import subprocess
import sys
import threading

import pytest
from launched_runs import FLAGS, ROOT, environment

pytestmark = pytest.mark.proof


def train(*flags, **variables):
    return subprocess.run(
        [sys.executable, "pretrain_gpt.py", *FLAGS, *map(str, flags)],
        cwd=ROOT,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_all_four_of_a_run_that_is_resumed(tmp_path):
    for name in ("mlflow", "trackio", "wandb.sdk"):
        pytest.importorskip(name)
    save = tmp_path / "save"
    variables = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    flags = ["--save", save, "--load", save, "--wandb-save-dir", tmp_path, "--run-name", "first"]
    flags += ["--report-to", "tensorboard,wandb,mlflow,trackio", "--train-iters", "6"]
    for more in (["--exit-interval", "4"], []):
        done = train(*flags, *more, **variables)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr + done.stdout, done.stderr + done.stdout
    expected = [
        (row["iteration"], row["loss"])
        for row in map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
        if row["kind"] == "train"
    ]
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{save}/mlflow.db")
    experiment = client.get_experiment_by_name("megatron")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    points = [
        (point.step, point.value)
        for run in runs
        for point in client.get_metric_history(run.info.run_id, "lm loss")
    ]
    assert points == expected
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    assert len(list((save / "tensorboard").glob("events.*"))) == 2
    assert list((tmp_path / "trackio").glob("megatron*.db"))


def test_a_server_that_does_not_answer_costs_a_run_nothing(tmp_path):
    """It takes connections, and says nothing."""
    pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=take_connections, args=(silent,), daemon=True).start()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        save = tmp_path / "save"
        flags = ["--save", save, "--train-iters", "4", "--report-to", "mlflow"]
        done = train(*flags, "--mlflow-tracking-uri", address)
    assert done.returncode == 0, done.stderr
    assert (save / "latest").read_text() == "global_step4"
    assert "--report-to mlflow: what was reported from about iteration" in done.stderr


def take_connections(server):
    kept = []
    while True:
        try:
            kept.append(server.accept())
        except OSError:
            return
