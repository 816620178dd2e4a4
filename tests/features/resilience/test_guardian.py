"""A guardian's answers to messages and signals, in a process next to a coordinator, which is the
test."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from selectors import DefaultSelector

import pytest

from megatron.features.resilience.restart import guardian as guardian_module
from megatron.features.resilience.restart.coordinator import Coordinator, Rules
from megatron.features.resilience.restart.guardian import Guardian
from megatron.features.resilience.restart.peers import Peer, hello

GUARDS = (
    "import importlib, sys, time\n"
    "from megatron.features.resilience.restart.coordinator import Rules\n"
    "from megatron.features.resilience.restart.guardian import guard\n"
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
        assert process.wait(10) == -number


def test_an_interrupt_ends_a_guardian_that_waits_in_the_store_of_torchrun():
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with guardian(store.port, "torch.distributed", **agent) as process:
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT


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


@pytest.fixture
def meeting():
    """The guardian of rank 0, which hears connections and does nothing else, and a function that
    connects to it."""
    one = object.__new__(Guardian)
    one._coordinator, one._selector = Coordinator(HELLO, "first", Rules()), DefaultSelector()
    one._strangers, one._size, one._place = [], 2, "127.0.0.1:1"
    one._listener = socket.create_server(("127.0.0.1", 0))

    def connected() -> Peer:
        far = Peer(socket.create_connection(one._listener.getsockname()))
        one._accept()
        return far

    yield one, connected
    one._listener.close()
    one._selector.close()


def turn(one) -> None:
    """Hears the connections that have something to say, as a guardian does."""
    for key, _ in one._selector.select(1):
        key.data()


HELLO = hello(rank=0, size=2, port=8, process=7, flags={})


def test_messages_that_come_with_the_hello_are_heard(meeting):
    one, connected = meeting
    far = connected()
    far.connection.sendall(
        json.dumps(HELLO | {"rank": 1}).encode()
        + b"\n"
        + json.dumps({"kind": "stopping", "generation": -1, "signal": 15}).encode()
        + b"\n"
    )
    turn(one)
    assert far.receive() == [{"kind": "finish", "status": 143}]
    assert one._coordinator.state == "over"


@pytest.mark.parametrize(
    "said, words",
    [
        (b"[" * 100_000, "nested more than 100 levels deep"),
        (b'{"rank":' * 5000 + b"1" + b"}" * 5000, "nested more than 100 levels deep"),
        (b'{"rank": ' + b"9" * 5000 + b"}", "an integer of 5,000 digits"),
        (b'{"rank": NaN}', "NaN is not a number"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"GET / HTTP/1.1\r", "is not valid JSON"),
        (b'"hello"', "a message is not an object"),
        (b"{}", "no 'host'"),
        (json.dumps(HELLO | {"rank": [1]}).encode(), "rank of a message is '[1]'"),
        (json.dumps(HELLO | {"rank": True}).encode(), "rank of a message is 'True'"),
        (json.dumps(HELLO | {"rank": -1}).encode(), "rank -1 of 2"),
        (json.dumps(HELLO | {"flags": []}).encode(), "flags of a message is '[]'"),
    ],
)
def test_what_no_guardian_says_is_refused_in_one_line(said, words, meeting, caplog):
    """And the guardian of this run that comes next is heard."""
    one, connected = meeting
    stranger, far = connected(), connected()
    stranger.connection.sendall(said + b"\n")
    while not caplog.records:  # a long line comes in pieces
        turn(one)
    (line,) = [record.getMessage() for record in caplog.records]
    assert words in line and line.endswith("the run continues") and len(line) < 400
    with pytest.raises(OSError):
        stranger.receive()
    far.send(HELLO | {"rank": 1})
    turn(one)
    assert [member.rank for member in one._coordinator.members] == [1]


def test_a_line_without_end_is_refused(meeting, caplog):
    one, connected = meeting
    stranger = connected()
    stranger.connection.setblocking(True)
    writing = threading.Thread(target=send_all, args=(stranger.connection, b"[" * 2**21))
    writing.start()
    while one._strangers:
        turn(one)
    writing.join()
    assert "a message of more than 1,048,576 bytes" in caplog.text


def send_all(connection, content):
    with contextlib.suppress(OSError):
        connection.sendall(content)


def test_connections_that_say_nothing_are_bounded(meeting, monkeypatch):
    monkeypatch.setattr(guardian_module, "MOST_STRANGERS", 3)
    one, connected = meeting
    silent = [connected() for _ in range(8)]
    assert len(one._strangers) == 5
    silent[-1].send(HELLO | {"rank": 1})
    turn(one)
    assert [member.rank for member in one._coordinator.members] == [1]


@pytest.mark.parametrize("said", [b"[" * 100_000, b"{}", b'{"kind": "stopping", "signal": "x"}'])
def test_a_guardian_that_says_something_else_is_lost(said, meeting, caplog):
    one, connected = meeting
    far = connected()
    far.send(HELLO | {"rank": 1})
    turn(one)
    (member,) = one._coordinator.members
    one._coordinator.state, member.running = "running", True
    far.connection.sendall(said + b"\n")
    while one._coordinator.members:
        turn(one)
    ((_, _, what),) = one._coordinator._reports
    assert "says what no guardian does" in what
