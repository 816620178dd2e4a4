"""What a guardian does with messages and signals, in a process of its own beside a coordinator that
is the test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from selectors import EVENT_READ, DefaultSelector

import pytest

from megatron.resilience.coordinator import Coordinator, Rules, hello
from megatron.resilience.guardian import Guardian
from megatron.resilience.peers import Peer

GUARDS = (
    "import importlib, sys, time\n"
    "from megatron.resilience.coordinator import Rules\n"
    "from megatron.resilience.guardian import guard\n"
    "importlib.import_module(sys.argv[1])\n"
    "guard(Rules(), {}, lambda: print('prepared', flush=True))\n"
    "print('trains', flush=True)\n"
    "time.sleep(60)\n"
)


@contextmanager
def guardian(port, module="time", **environment):
    """The guardian of rank 1, which has imported a module and looks for that of rank 0."""
    place = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = {name: str(value) for name, value in (place | environment).items()}
    command = [sys.executable, "-c", GUARDS, module]
    with subprocess.Popen(
        command, env=os.environ | own, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "prepared\n"
            yield process
        finally:
            process.kill()


@contextmanager
def silent_place():
    """A port at which nobody listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_a_guardian_that_looks_for_rank_0(number):
    with silent_place() as port, guardian(port) as process:
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(1) == -number


def test_an_interrupt_ends_a_guardian_that_waits_in_the_store_of_torchrun():
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with guardian(store.port, "torch.distributed", **agent) as process:
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(1) == -signal.SIGINT


def test_a_stop_that_comes_with_the_start_is_obeyed():
    start = {"kind": "start", "generation": 4, "rank": 1, "size": 2, "address": "127.0.0.1"}
    start |= {"port": 1, "failure": None, "iteration": 0, "batch": 0}
    stop = {"kind": "stop", "generation": 4, "grace": 5.0}
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        guardian(server.getsockname()[1]) as process,
        server.accept()[0] as connection,
    ):
        connection.settimeout(5)
        said = connection.makefile("r")
        assert json.loads(said.readline())["rank"] == 1
        connection.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in (start, stop)))
        answer = json.loads(said.readline())
        assert (answer["kind"], answer["generation"]) == ("ended", 4)
        assert answer["killed"] and answer["port"] > 0
        connection.sendall(json.dumps(start | {"generation": 5}).encode() + b"\n")
        assert process.stdout.readline() == "trains\n"


def test_messages_that_come_with_the_hello_are_heard():
    """A coordinator's guardian that does nothing but hear a new connection."""
    one = object.__new__(Guardian)
    own = hello(rank=0, size=2, port=8, process=7, flags={})
    one._coordinator, one._selector = Coordinator(own, "first", Rules()), DefaultSelector()
    near, far = (Peer(end) for end in socket.socketpair())
    one._selector.register(near, EVENT_READ)
    far.send(own | {"rank": 1})
    far.send({"kind": "stopping", "generation": -1, "signal": 15})
    one._introduced(near)
    assert far.receive() == [{"kind": "finish", "status": 143}]
    assert one._coordinator.state == "over"
