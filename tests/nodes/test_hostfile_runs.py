"""DeepSpeed's hostfile over sshd and pdsh between four nodes: a run is stopped and resumes on
two at another layout; it loses a node and trains on without it."""

import re
import time

import pytest
from nodes.hostfile_runs import a_run, hostfile, losses, undisturbed
from nodes.namespaces import nodes, require

NAMES = {f"node-{number}": 1 for number in range(1, 5)}


@pytest.fixture
def four(tmp_path):
    require("pdsh")
    with nodes(4, tmp_path / "nodes") as machines:
        yield machines


@pytest.mark.proof
def test_stopped_on_four_nodes_and_resumed_on_two(four, tmp_path):
    """No step is lost, and the losses are those of one process that nothing interrupts."""
    hosts = hostfile(tmp_path / "hostfile", NAMES)
    length = ["--train-iters", 4000, "--exit-interval", 100000, "--save-interval", 1000]
    with a_run(four[0], tmp_path, *length, "--zero-stage", 1, HOSTFILE=hosts, RESTARTS=3) as run:
        assert run.wait_for(r"iteration +40/") > 0
        run.stop()
    said = run.said()
    assert "ranks: node-1 0, node-2 1, node-3 2, node-4 3" in said
    assert "starting again" not in said
    deadline = time.monotonic() + 60
    while not (run.save / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    stopped = int((run.save / "latest").read_text().removeprefix("global_step"))
    assert 40 <= stopped < 4000
    end = stopped + 20
    again = ["--train-iters", 4000, "--exit-interval", end, "--tensor-model-parallel-size", 2]
    with a_run(
        four[0], tmp_path, *again, HOSTFILE=hosts, INCLUDE="node-1@node-4", RESTARTS=3
    ) as run:
        assert run.wait() == 0, run.said()[-4000:]
    assert "ranks: node-1 0, node-4 1" in run.said()
    assert re.search(rf"resumed from \S+ at iteration {stopped}\b", run.said())
    ours = losses(run.save)
    theirs = undisturbed(tmp_path / "one", "--train-iters", 4000, "--exit-interval", end)
    assert list(ours) == list(range(1, end + 1))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.proof
def test_a_node_is_lost(four, tmp_path):
    """It is named, left out, and the others train on from the newest checkpoint."""
    hosts = hostfile(tmp_path / "hostfile", NAMES)
    flags = ["--train-iters", 100000, "--save-interval", 20, "--keep-last", 2]
    with a_run(
        four[0], tmp_path, *flags, "--global-batch-size", 12, "--zero-stage", 1,
        HOSTFILE=hosts, RESTARTS=3, MIN_NODES=2,
    ) as run:  # fmt: skip
        run.wait_for(r"iteration +60/")
        four[2].die()
        seconds = run.wait_for(r"(?s)resumed from \S+ at iteration .*iteration +\d+/")
        print(f"training again after {seconds:.1f} s")
        said = run.said()
    assert re.search(r"rank 2 \(node-3, pid \d+\) does not answer", said)
    assert "left out node-3: ssh: connect to host node-3" in said
    assert "ranks: node-1 0, node-2 1, node-4 2" in said
    assert "layout: 3 processes" in said
