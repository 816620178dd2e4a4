"""What a guardian does with messages and signals, in a process of its own beside a coordinator that
is the test."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

GUARDS = (
    "import importlib, sys, time\n"
    "from megatron.resilience.coordinator import Rules\n"
    "from megatron.resilience.guardian import guard\n"
    "importlib.import_module(sys.argv[1])\n"
    "guard(Rules(), lambda: print('prepared', flush=True))\n"
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
