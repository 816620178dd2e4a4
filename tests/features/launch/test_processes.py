"""What the flags say of processes and nodes, against what a launcher has started and a machine is.

Starting them for real is in tests/e2e/test_launch.py.
"""

import os
import socket
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser
from megatron.engine.environment import meeting
from megatron.features.launch import processes as launch
from megatron.features.launch.processes import Node, run_node, set_infiniband
from megatron.run.run import start_processes
from megatron.util.processes import death

TWO_NODES = "--num-gpus-per-node 2 --num-nodes 2 --node-ips "
LAUNCHER = "WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE RANK NODE_RANK GLOO_SOCKET_IFNAME".split()
NETWORK = "ONEFLOW_COMM_NET_IB_ENABLE NCCL_IB_DISABLE SLURM_STEP_NUM_TASKS".split()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """A shell's environment, which is restored."""
    for name in (*LAUNCHER, *NETWORK):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def started(monkeypatch):
    """The arguments of the nodes that would have been started."""
    calls = []
    monkeypatch.setattr(launch, "run_node", lambda *call: calls.append(call) or 7)
    return calls


def start(flags: str) -> int:
    return start_processes(FlagParser(*FLAG_CLASSES).settings(flags.split()), flags.split())


@pytest.mark.parametrize("flags", ["", "--num-gpus-per-node 1", "--num-nodes 1 --node-ips a,b"])
def test_one_process_needs_no_launcher(started, flags):
    assert start(flags) == 1
    assert not started


def test_a_node_is_started_with_the_same_command_line(started):
    flags = "--num-gpus-per-node 3 --distributed-timeout-minutes 2 --lr 1"
    with pytest.raises(SystemExit, match="7"):
        start(flags)
    [(node, command, _, minutes)] = started
    assert node == Node(3) and minutes == 2
    assert command[-len(flags.split()) :] == flags.split()


def test_a_program_is_started_again_as_it_was(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["some/pretrain_gpt.py", "--lr"])
    assert launch._program() == ["some/pretrain_gpt.py"]
    sys.modules["__main__"].__spec__ = SimpleNamespace(name="oneflow_gpt.training")
    assert launch._program() == ["-m", "oneflow_gpt.training"]


@pytest.mark.parametrize(
    ("listed", "rank"), [("10.99.99.9,127.0.0.1", 1), ("localhost,10.99.99.9", 0)]
)
def test_a_node_finds_its_rank_by_its_address(started, listed, rank):
    """Addresses after the first --num-nodes are not used."""
    with pytest.raises(SystemExit):
        start(f"{TWO_NODES}{listed},127.0.0.1 --ctrl-port 4000")
    [(node, _, port, _)] = started
    assert node == Node(2, rank, tuple(listed.split(","))) and port == 4000
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_node_rank_overrides_the_addresses(started, monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(SystemExit):
        start(f"{TWO_NODES}127.0.0.1,127.0.0.1")
    assert started[0][0].rank == 1


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ("--num-nodes 2", {}, "--num-nodes 2 needs --node-ips with the addresses of 2 nodes"),
        (f"{TWO_NODES}10.0.0.1", {}, "--node-ips 10.0.0.1 has 1"),
        (f"{TWO_NODES}10.99.99.8,10.99.99.9", {}, "none .* whose addresses are .*127.0.0.1.*RANK"),
        (f"{TWO_NODES}127.0.0.1,localhost", {}, "127.0.0.1,localhost: several of them are"),
        (f"{TWO_NODES}a,b", {"NODE_RANK": "2"}, "NODE_RANK=2: .* --node-ips a,b .* 0 to 1"),
        (f"{TWO_NODES}a,b", {"SLURM_STEP_NUM_TASKS": "4"}, "TASKS is 4 and --num-nodes 2"),
        ("--num-nodes 0", {}, "--num-nodes 0 must be positive"),
        (
            "--num-gpus-per-node 4 --num-nodes 2",
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"},
            r"--num-gpus-per-node 4 contradicts .* 2 processes .*LOCAL_WORLD_SIZE",
        ),
        ("", {"ONEFLOW_COMM_NET_IB_ENABLE": "yes"}, "IB_ENABLE=yes: it must be 0 or 1"),
        (
            "",
            {"ONEFLOW_COMM_NET_IB_ENABLE": "1", "NCCL_IB_DISABLE": "1"},
            "IB_ENABLE=1 contradicts NCCL_IB_DISABLE=1",
        ),
    ],
)
def test_contradictions_are_named(started, monkeypatch, flags, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        start(flags)
    assert not started


def test_gpus_that_are_not_there(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(ConfigError, match="per-node 4: 2 GPUs are visible .*DEVICES=4,5"):
        start("--num-gpus-per-node 4")
    with pytest.raises(SystemExit):
        start("--num-gpus-per-node 2")


def test_what_a_launcher_has_started_is_not_started_again(started, monkeypatch, caplog):
    launcher = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO", "megatron.features.launch.processes"):
        assert start(f"{TWO_NODES}a,b") == 4
        assert not caplog.messages
        assert start(f"{TWO_NODES}b,a") == 4
    assert caplog.messages == ["--node-ips b,a changes nothing: the launcher connects the nodes"]
    assert not started


@pytest.mark.parametrize(("theirs", "ours"), [("0", "1"), ("1", "0")])
def test_oneflows_variable_for_infiniband(monkeypatch, caplog, theirs, ours):
    monkeypatch.setenv("ONEFLOW_COMM_NET_IB_ENABLE", theirs)
    with caplog.at_level("INFO", "megatron.features.launch.processes"):
        set_infiniband()
        set_infiniband()
    assert os.environ["NCCL_IB_DISABLE"] == ours
    assert caplog.messages == [
        f"ONEFLOW_COMM_NET_IB_ENABLE={theirs} is set as NCCL_IB_DISABLE={ours}: NCCL connects the "
        "nodes"
    ]


def test_processes_that_do_not_meet():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        short = timedelta(seconds=0.3)

        def meet(server: bool) -> None:
            with meeting("process 0 of 2", "127.0.0.1", port, "MASTER_PORT", timedelta(minutes=3)):
                dist.TCPStore("127.0.0.1", port, 2, server, short)

        with pytest.raises(ConfigError, match="could not reach 127.0.0.1:.*MASTER_PORT.* 3 min"):
            meet(server=False)
        other.listen()
        with pytest.raises(ConfigError, match=f"MASTER_PORT {port}: the port is in use"):
            meet(server=True)
    with pytest.raises(ConfigError, match="process 0 of 2 waited 3 minutes .*1/2 clients joined"):
        meet(server=True)


# What process 1 does at its end is an argument, so that one program serves every way to end.
PROCESS = """
import os, signal, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(" ".join(os.environ[name] for name in names))
if os.environ["RANK"] == "1":
    exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("end", "status", "printed"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, f"error: process 1 {death(-9)}\n"),
    ],
)
def test_the_status_is_that_of_the_processes(tmp_path, monkeypatch, capfd, end, status, printed):
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert run_node(Node(2), ["-c", PROCESS, str(tmp_path), end], 1, 1.0) == status
    assert capfd.readouterr().err == printed
    for rank in "01" if not status else "1":  # another may be ended before it has begun
        assert (tmp_path / rank).read_text() == f"{rank} {rank} 2 2 1"
