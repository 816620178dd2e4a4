"""A machine that does not answer is told from a process that is stopped."""

import os
import signal
import socket
import subprocess
import sys

from megatron.features.resilience.watch.processes import Door, SilentMachines, is_gone

HOLDS_A_DOOR = (
    "import time; from megatron.features.resilience.watch.processes import Door\n"
    "print(Door('127.0.0.1').address[1], flush=True); time.sleep(60)"
)


def test_a_door_answers_as_long_as_its_machine():
    door = Door("127.0.0.1")
    for _ in range(300):  # more than the system keeps waiting
        assert not is_gone(*door.address)
        door.clear()
    door.close()
    assert not is_gone(*door.address)  # refused, by a machine that lives


def test_a_stopped_process_is_not_gone():
    words = [sys.executable, "-c", HOLDS_A_DOOR]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert not is_gone("127.0.0.1", port, 1.0)
        finally:
            process.kill()


def test_an_address_without_a_machine_is_gone():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with socket.create_connection(address):
            assert is_gone(*address, 0.2)  # the system takes no further one, and says nothing
    assert not is_gone("no-such-host.invalid", 1, 0.2)
    assert not is_gone(*Door("no-such-host.invalid").address)


def test_only_silent_machines_are_looked_into():
    asked = []
    machines = SilentMachines(lambda host, port: asked.append(host) or host == "b")
    door = {name: (name, 1) for name in "abc"}
    for beat in range(7):
        said = {"a": (beat, door["a"]), "b": (beat, door["b"]), "c": (0, door["c"])}
        assert machines.look(said) == ""
    assert asked == ["c"]  # silent for five looks; it answered
    found = [machines.look({"a": (9 + i, door["a"]), "b": (9, door["b"])}) for i in range(7)]
    assert found == ["", "", "", "", "", "b", "b"]
    assert asked == ["c", "b", "b"]
