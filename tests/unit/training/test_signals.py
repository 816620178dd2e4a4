"""Stop requests from real signals, a lost parent and a clock set by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import megatron
from megatron.training.signals import STOP_SIGNALS, StopRequest

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(megatron.__file__).parents[1])}

WAIT_FOR_REQUEST = """
import os, sys, time
from megatron.training.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    until = time.monotonic() + 20
    while not stop.requested and time.monotonic() < until:
        time.sleep(0.02)
    with open(sys.argv[1] + ".tmp", "w") as out:
        out.write(str(stop.requested))
    os.rename(sys.argv[1] + ".tmp", sys.argv[1])
"""


def wait_for_text(path: Path, seconds: float = 15) -> str:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_is_noted_and_named(number):
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name


def test_first_signal_is_the_one_named():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGUSR1"


def test_handlers_of_before_are_put_back():
    def handler(number, frame):
        raise AssertionError

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyError), StopRequest():
            # The note of a Ctrl-C changes a handler, too.
            os.kill(os.getpid(), signal.SIGINT)
            raise KeyError
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
    finally:
        signal.signal(signal.SIGUSR1, before[signal.SIGUSR1])


def test_deadline():
    now = [50.0]
    stop = StopRequest(deadline_minutes=1.5, clock=lambda: now[0])
    now[0] += 89.9
    assert stop.requested is None
    now[0] += 0.2
    assert stop.requested == "--exit-duration-in-mins 1.5"


def test_second_ctrl_c_kills():
    code = (
        "import time\n"
        "from megatron.training.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while not stop.requested: time.sleep(0.01)\n"
        "    print(stop.requested, flush=True)\n"
        "    time.sleep(30)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "SIGINT\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == -signal.SIGINT


@pytest.mark.parametrize("launcher", [True, False])
def test_lost_parent_counts_only_under_a_launcher(tmp_path, launcher):
    """The process in the middle starts a worker and is killed as soon as that runs."""
    answer = tmp_path / "answer"
    wait = WAIT_FOR_REQUEST if launcher else WAIT_FOR_REQUEST.replace("+ 20", "+ 1")
    middle = (
        "import subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]],"
        " stdout=subprocess.PIPE, text=True)\n"
        "print(worker.stdout.readline(), end='', flush=True)\n"
        "worker.wait()\n"
    )
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "LOCAL_RANK"}
    if launcher:
        environment["LOCAL_RANK"] = "0"
    with subprocess.Popen(
        [sys.executable, "-c", middle, wait, str(answer)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    expected = f"end of the launcher (process {process.pid})" if launcher else "None"
    assert wait_for_text(answer) == expected
