"""DeepSpeed's hostfile over sshd and pdsh between four nodes: a run is stopped and resumes on
two at another layout; it loses a node and trains on without it."""

import re
import subprocess

import pytest
from launched_runs import BIN, FLAGS, ROOT
from nodes.hostfile_runs import a_run, hostfile, losses, undisturbed, variables
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
    # The masks of dropout depend on the layout.
    length = ["--train-iters", 4000, "--attention-dropout", 0, "--hidden-dropout", 0]
    with a_run(four[0], tmp_path, *length, "--zero-stage", 1, HOSTFILE=hosts, RESTARTS=3) as run:
        run.wait_for(r"iteration +20/")
        assert run.stop() == 0, run.said()[-4000:]
    said = run.said()
    assert "ranks: node-1 0, node-2 1, node-3 2, node-4 3" in said
    assert "starting again" not in said
    stopped = int((run.save / "latest").read_text().removeprefix("global_step"))
    assert 20 <= stopped < 4000
    end = stopped + 20
    again = [*length, "--exit-interval", end, "--tensor-model-parallel-size", 2]
    with a_run(
        four[0], tmp_path, *again, HOSTFILE=hosts, INCLUDE="node-1@node-4", RESTARTS=3
    ) as run:
        assert run.wait() == 0, run.said()[-4000:]
    assert "ranks: node-1 0, node-4 1" in run.said()
    assert re.search(rf"resumed from \S+ at iteration {stopped}\b", run.said())
    ours = losses(run.save)
    theirs = undisturbed(tmp_path / "one", *length, "--exit-interval", end)
    assert list(ours) == list(range(1, end + 1))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize("lost", [1, 2], ids=["with-the-store", "another"])
def test_a_node_is_lost(four, tmp_path, lost):
    """Without a word, as when its power fails: it is named, left out, and the others train on from
    the newest checkpoint. The first node starts the run and takes no part."""
    hosts = hostfile(tmp_path / "hostfile", {name: 1 for name in NAMES if name != "node-1"})
    flags = ["--train-iters", 100000, "--save-interval", 10, "--keep-last", 2]
    with a_run(
        four[0], tmp_path, *flags, "--global-batch-size", 6, "--zero-stage", 1,
        HOSTFILE=hosts, RESTARTS=3, MIN_NODES=2,
    ) as run:  # fmt: skip
        run.wait_for(r"iteration +20/")
        four[lost].die()
        ended = run.wait_for("starting again")
        begun = run.wait_for(r"(?s)resumed from \S+ at iteration .*iteration +\d+/")
        print(f"{four[lost].name} lost: ended after {ended:.0f} s, trains {begun:.0f} s later")
        said = run.said()
    name = four[lost].name
    assert re.search(rf"rank {lost - 1} \({name}, pid \d+\).*does not answer.* gone", said)
    assert f"left out {name}: ssh: connect to host {name}" in said
    left = [other for other in ("node-2", "node-3", "node-4") if other != name]
    assert f"ranks: {left[0]} 0, {left[1]} 1\n" in said
    assert "layout: 2 processes" in said


@pytest.mark.proof
def test_one_node_is_trained_on_where_it_is(four, tmp_path):
    """Not on the node that starts the run; a signal reaches it there."""
    hosts = hostfile(tmp_path / "hostfile", NAMES)
    flags = ["--train-iters", 100000, "--zero-stage", 1]
    with a_run(four[0], tmp_path, *flags, HOSTFILE=hosts, INCLUDE="node-3") as run:
        run.wait_for(r"(?m)^node-3: .*iteration +2/")
        trains = ["pgrep", "-f", "pretrain_gpt.py.* --local_rank"]
        assert four[2].run(*trains).stdout and not four[0].run(*trains).stdout
        assert run.stop() == 0, run.said()[-4000:]
    assert "stopped by SIGTERM" in run.said()


@pytest.mark.proof
def test_launchers_and_shells(tmp_path):
    """pdsh, Debian's Open MPI and --no_ssh train alike; root's shells are bash, fish and dash, and
    .deepspeed_env reaches the processes."""
    require("pdsh", "mpirun", "fish")
    hosts = hostfile(tmp_path / "hosts", {f"node-{number}": 1 for number in (1, 2, 3)})
    (tmp_path / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nMEGATRON_NOTE=a b\n")
    flags = ["--train-iters", 3, "--zero-stage", 1, "--global-batch-size", 6]
    settings = {"HOSTFILE": hosts, "HOME": tmp_path}
    openmpi = "--launcher openmpi --launcher_args=--allow-run-as-root"
    shells = ["/bin/bash", "/usr/bin/fish", "/bin/dash"]
    found = {}
    with nodes(3, tmp_path / "nodes", shells=shells) as machines:
        for name, words in {"pdsh": "", "openmpi": openmpi}.items():
            folder = tmp_path / name
            folder.mkdir()
            own = {**settings, "DEEPSPEED_FLAGS": words}
            with a_run(machines[0], folder, *flags, **own) as run:
                assert run.wait() == 0, run.said()[-4000:]
            assert "layout: 3 processes" in run.said()
            found[name] = losses(run.save)
        line = [BIN / "deepspeed", "--hostfile", hosts, "--no_ssh", "--master_addr", "node-1"]
        run = ["pretrain_gpt.py", *FLAGS, *flags, "--save", tmp_path / "alone"]
        started = [
            machine.start(
                *line, "--node_rank", rank, *run, cwd=ROOT, env=variables(),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank, machine in enumerate(machines)
        ]  # fmt: skip
        said = [process.communicate(timeout=300)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0, 0], said
        found["no_ssh"] = losses(tmp_path / "alone")
    assert list(found["pdsh"]) == [1, 2, 3]
    assert found["openmpi"] == found["pdsh"] == found["no_ssh"]
