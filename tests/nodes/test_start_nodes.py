"""tools/start_nodes.py on nodes with sshd: whoever cannot take part is named, before anything
starts. In place of deepspeed a script prints what it is told."""

import re
import signal
import subprocess
import sys

import pytest
from launched_runs import ROOT, environment
from nodes.hostfile_runs import hostfile
from nodes.namespaces import nodes, require, send

NAMES = {f"node-{number}": 2 for number in range(1, 4)}
REPORT = "#!/bin/sh\necho told: $*\necho $PDSH_SSH_ARGS_APPEND\n"
SLEEP = "#!/bin/sh\nsleep 50 &\necho begun\nwait\necho over\n"


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    require("fish")
    folder, private = (tmp_path_factory.mktemp(name) for name in ("nodes", "private"))
    shells = ["/bin/bash", "/usr/bin/fish", "/bin/dash"]
    with nodes(3, folder / "nodes", shells=shells, private=[private]) as made:
        made[0].private = private
        yield made


def words(folder, hosts, *flags, script=REPORT, command=()):
    deepspeed = folder / "deepspeed"
    deepspeed.write_text(script)
    deepspeed.chmod(0o755)
    tool = [sys.executable, ROOT / "tools" / "start_nodes.py", "--hostfile", hosts, *flags]
    return [*tool, deepspeed, *command, "train.py"]


def started(head, folder, *flags, cwd=ROOT, names=NAMES, command=()):
    line = words(folder, hostfile(folder / "hosts", names), *flags, command=command)
    return head.run(*line, cwd=cwd, env=environment())


def test_shells_and_choices(machines, tmp_path):
    """Root's shells are bash, fish and dash."""
    done = started(machines[0], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ranks: node-1 0-1, node-2 2-3, node-3 4-5\n" in done.stderr
    assert done.stdout == (
        f"told: --hostfile {tmp_path}/hosts train.py\n"
        "-o ServerAliveInterval=4 -o ServerAliveCountMax=3 -o ConnectTimeout=10\n"
    )
    done = started(machines[0], tmp_path, "--exclude", "node-1:0@node-3")
    assert "ranks: node-1 0, node-2 1-2\n" in done.stderr
    assert " --include node-1:1@node-2:0,1 train.py" in done.stdout


def test_one_node_that_is_not_this_machine(machines, tmp_path):
    """DeepSpeed alone starts a single node's processes on the machine where it is called."""
    include = "--include node-{0}:0,1"
    for number, forced in ((1, ""), (3, " --force_multi")):
        done = started(machines[0], tmp_path, "--include", f"node-{number}")
        assert done.returncode == 0, done.stderr
        assert f" {include.format(number)}{forced} train.py" in done.stdout
    done = started(machines[0], tmp_path, names={"node-2": 1})
    assert done.stdout.startswith(f"told: --hostfile {tmp_path}/hosts --force_multi train.py\n")
    done = started(machines[0], tmp_path, names={machines[0].address: 1})
    assert done.stdout.startswith(f"told: --hostfile {tmp_path}/hosts train.py\n")
    names = {"node-2": 1, "node-9": 1}
    done = started(machines[0], tmp_path, "--min-nodes", 1, names=names)
    assert " --include node-2:0 --force_multi train.py" in done.stdout, done.stderr


def test_a_port_of_sshd_among_deepspeeds_flags(machines, tmp_path):
    for command in (["--ssh_port", "2222"], ["--ssh_port=2222"]):
        done = started(machines[0], tmp_path, command=command)
        assert done.returncode == 3 and "port 2222: Connection refused" in done.stderr
    done = started(machines[0], tmp_path, command=["--ssh_port", "x"])
    assert done.returncode == 2 and "--ssh_port x: expected the number of a port" in done.stderr


@pytest.mark.proof
def test_a_whole_hostfile_for_mpirun(machines, tmp_path):
    mpi = ["--launcher", "openmpi"]
    line = words(tmp_path, hostfile(tmp_path / "hosts", NAMES), "--include", "node-2:0@node-3",
                 script='#!/bin/sh\necho $1; cat "$2"\n', command=mpi)  # fmt: skip
    done = machines[0].run(*line, cwd=ROOT, env=environment())
    assert done.stdout == "--hostfile\nnode-2 slots=1\nnode-3 slots=2\n", done.stderr
    done = started(machines[0], tmp_path, "--include", "node-2:1", command=mpi)
    assert done.returncode == 2 and "cannot take slots [1] of node-2" in done.stderr


def test_nodes_that_cannot_take_part(machines, tmp_path):
    head = machines[0]
    names = {**NAMES, "node-9": 2}
    machines[2].stop_sshd()
    try:
        done = started(head, tmp_path, names=NAMES)
        assert done.returncode == 3 and not done.stdout
        assert re.search(r"2 of 3 nodes can take part, 3 must; node-3: .*Connection refused; start "
                         r"sshd .* --exclude node-3$", done.stderr)  # fmt: skip
        done = started(head, tmp_path, "--min-nodes", 2, names=names)
        assert done.returncode == 0, done.stderr
        assert "warning: left out node-3: ssh: connect to host node-3" in done.stderr
        assert "warning: left out node-9: ssh: Could not resolve hostname node-9" in done.stderr
        assert " --include node-1:0,1@node-2:0,1 train.py" in done.stdout
        done = started(head, tmp_path, "--min-nodes", 3, names=names)
        # No DNS answers here, which may change; an answer that node-9 is unknown has status 2.
        status = 3 if "Temporary failure in name resolution" in done.stderr else 2
        assert done.returncode == status and "2 of 4 nodes can take part, 3 must" in done.stderr
    finally:
        machines[2].start_sshd()


@pytest.mark.proof
def test_a_folder_that_a_node_does_not_have(machines, tmp_path):
    head = machines[0]
    head.run("mkdir", head.private / "run").check_returncode()
    line = words(tmp_path, hostfile(tmp_path / "hosts", NAMES))
    inside = f"cd {head.private}/run && " + " ".join(map(str, line))
    done = head.run("sh", "-c", inside, env=environment())
    assert done.returncode == 2 and not done.stdout
    assert f"node-2: no folder {head.private}/run; mount or copy it" in done.stderr


@pytest.mark.proof
def test_a_signal_reaches_deepspeed_once_more(machines, tmp_path):
    line = words(tmp_path, hostfile(tmp_path / "hosts", NAMES), script=SLEEP)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = machines[0].start(*line, cwd=ROOT, env=environment(), **options)
    assert process.stdout.readline() == "begun\n"
    send(process, signal.SIGUSR1)
    assert any(
        "SIGUSR1: the processes on all nodes save and end" in text for text in process.stderr
    )
    send(process, signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
