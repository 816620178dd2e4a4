"""pretrain_gpt.py as people start it: launchers, nodes, signals, a killed run, a full disk."""

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched_runs import ADDRESSES, BIN, FLAGS, ROOT, environment, free_port, nodes
from warm_runs import alive, status_of, wait

__all__ = ["nodes"]  # a fixture


def command(launcher, *flags):
    start = {
        "python": [sys.executable],
        "torchrun": [str(BIN / "torchrun"), "--nproc_per_node=2", "--master_port", free_port()],
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", free_port()],
        "launch": [
            *(sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2"),
            *("--nnodes", "1", "--node_rank", "0", "--master_addr", "localhost"),
            *("--master_port", free_port()),
        ],
        "own": [sys.executable],
        "oneflow": [sys.executable, "-m", "oneflow_gpt.training"],
    }[launcher]
    own = ["--num-gpus-per-node", "2"] if launcher in ("own", "oneflow") else []
    program = ["pretrain_gpt.py"] if launcher != "oneflow" else []
    return [*start, *program, *FLAGS, *own, *map(str, flags)]


def run(launcher, *flags, **options):
    return subprocess.run(
        command(launcher, *flags),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        **options,
    )


def rows(save):
    # A line that is just being written has no end yet.
    lines = (save / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def losses_of(save):
    return [row["loss"] for row in rows(save)]


@pytest.mark.proof
def test_launchers_train_alike(tmp_path):
    losses = {}
    for launcher in ("python", "torchrun", "oneflow", "deepspeed", "launch"):
        config = ROOT / "deepspeed_configs" / "ds_zero1.json"
        save = tmp_path / launcher
        done = run(launcher, "--train-iters", 3, "--save", save, "--deepspeed_config", config)
        assert done.returncode == 0, done.stderr
        losses[launcher] = losses_of(save)
        assert "ZeRO stage 1" in done.stdout
        assert ("layout: 2 processes" in done.stdout) == (launcher != "python")
    assert losses["torchrun"] == pytest.approx(losses["python"], rel=1e-6)
    for launcher in ("oneflow", "deepspeed", "launch"):
        assert losses[launcher] == losses["torchrun"], launcher


@pytest.mark.proof
def test_two_nodes_train_as_four_processes(nodes, tmp_path):
    """The same command on each node; a third address in the list is not used."""
    layout = ["--tensor-model-parallel-size", "2", "--zero-stage", "1", "--train-iters", "3"]
    words = [sys.executable, "pretrain_gpt.py", *FLAGS, *layout, "--save", str(tmp_path / "nodes")]
    words += ["--num-gpus-per-node", "2", "--num-nodes", "2", "--ctrl-port", free_port()]
    words += ["--node-ips", ",".join([*ADDRESSES, "10.77.16.3"])]
    clean = {k: v for k, v in environment().items() if k != "GLOO_SOCKET_IFNAME"}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *words],
            cwd=ROOT, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name in nodes
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "iteration        3/" in outputs[0] and "iteration" not in outputs[1]
    one_node = tmp_path / "one-node"
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    done = subprocess.run(
        [torchrun, "--nproc-per-node", "4", "pretrain_gpt.py", *FLAGS, *layout, "--save", one_node],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "nodes") == losses_of(one_node)
    assert len(losses_of(one_node)) == 3


def wait_for_step(save, process, step=3):
    deadline = time.time() + 120
    while time.time() < deadline:
        if (save / "metrics.jsonl").exists() and len(rows(save)) >= step:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError("no step was taken")


def terminate_after_a_step(argv, save):
    """Starts a run and ends it by SIGTERM; returns the process and what it printed."""
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    wait_for_step(save, process)
    process.send_signal(signal.SIGTERM)
    return process, process.communicate(timeout=120)[0]


@pytest.mark.proof
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_sigterm_saves_and_resumes(tmp_path, launcher):
    """DeepSpeed's launcher leaves its workers behind on SIGTERM; they notice and save."""
    argv = command(launcher, "--train-iters", 100000, "--save", tmp_path, "--zero-stage", 1)
    _, output = terminate_after_a_step(argv, tmp_path)
    deadline = time.time() + 60
    while not (tmp_path / "latest").exists() and time.time() < deadline:
        time.sleep(0.1)
    saved = json.loads(next(tmp_path.glob("global_step*/state.json")).read_text())
    step = saved["iteration"]
    assert 3 <= step < 100000, output
    done = run(launcher, "--train-iters", step + 1, "--save", tmp_path, "--load", tmp_path,
               "--zero-stage", 1)  # fmt: skip
    assert f"at iteration {step}" in done.stdout, done.stdout + done.stderr
    assert [row["iteration"] for row in rows(tmp_path)] == list(range(1, step + 2))


def test_sigterm_reaches_the_processes_that_the_program_starts(tmp_path):
    """They save, and their exit status is that of the command."""
    argv = command("own", "--train-iters", 100000, "--save", tmp_path)
    process, output = terminate_after_a_step(argv, tmp_path)
    assert process.returncode == 0, output
    assert (tmp_path / "latest").exists(), output


@pytest.mark.proof
def test_killed_run_resumes_from_the_last_save(tmp_path):
    flags = ["--save", tmp_path, "--load", tmp_path, "--save-interval", 2]
    argv = command("python", "--train-iters", 100000, *flags)
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_step(tmp_path, process, 5)
    process.kill()
    process.wait()
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= 4
    done = run("python", "--train-iters", saved + 2, *flags)
    assert done.returncode == 0, done.stderr
    assert f"at iteration {saved}" in done.stdout
    assert not list(tmp_path.glob(".global_step*"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte: two of these models' checkpoints, and no third."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only the superuser can mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.proof
@pytest.mark.parametrize("mode", [[], ["--async-save"]])
def test_a_disk_fills_during_a_run(small_disk, mode):
    """Two saves succeed; the others say what is wrong, and the run with them at its end. With room
    for one more the same command continues."""
    flags = ["--save", small_disk, "--load", small_disk, "--save-interval", 2, *mode]
    done = run("python", "--train-iters", 8, *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    for step, there in ((2, True), (4, True), (6, False), (8, False)):
        assert (f"saved checkpoint at iteration {step} " in done.stdout) == there
        assert (f"WARNING: no checkpoint at iteration {step}" in done.stdout) != there
    error = rf"error: saving to {small_disk} failed: .*No space left on device: '{small_disk}/.*'; "
    assert re.search(f"{error}earlier checkpoints are untouched", done.stderr), done.stderr
    assert (small_disk / "latest").read_text() == "global_step4"
    assert not list(small_disk.glob(".global_step*"))
    shutil.rmtree(small_disk / "global_step2")
    # Each save needs room next to the checkpoint that it supersedes, and makes room again.
    done = run("python", "--train-iters", 10, *flags, "--keep-last", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "at iteration 4" in done.stdout
    assert [path.name for path in small_disk.glob("global_step*")] == ["global_step10"]


def test_full_disk_keeps_the_last_checkpoint(warm, tmp_path):
    """A limit on file size stands in for the full disk: writes fail in the middle of a file."""
    save = tmp_path / "save"

    def train(steps: int, largest: int | None = None) -> tuple[int | None, str]:
        output = tmp_path / f"output{steps}-{largest}"
        flags = ["--train-iters", steps, "--save", save, "--load", save]
        processes = warm.start([*FLAGS, *flags], 1, output)
        if largest is not None:
            resource.prlimit(processes[0], resource.RLIMIT_FSIZE, (largest, largest))
        wait(processes, lambda: not alive(processes), pause=0.01)
        return status_of(output, 0), output.read_text()

    assert train(2)[0] == 0
    size = (save / "global_step2" / "optimizer-00000.safetensors").stat().st_size
    status, told = train(4, size // 2)
    assert status == 2, told
    assert f"saving to {save} failed" in told
    assert "earlier checkpoints are untouched" in told
    assert (save / "latest").read_text() == "global_step2"
    assert not list(save.glob(".global_step*"))
    assert train(4)[0] == 0


@pytest.mark.proof
def test_explain_config(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": 0.25, "train_batch_size": "auto"}')
    done = run("python", "--train-iters", 3, "--deepspeed_config", path, "--explain-config")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split(None, 2)[1:] for line in done.stdout.splitlines()}
    assert lines["hidden_size"] == ["32", "flag --hidden-size"]
    assert lines["clip_grad"] == ["0.25", "ds.json: gradient_clipping"]
    assert lines["seed"] == ["1234", "default"]
    assert lines["ffn_hidden_size"][0] == "128"
    assert lines["ffn_hidden_size"][1].startswith("derived")
    assert lines["padded_vocab_size"][0] == "128"
