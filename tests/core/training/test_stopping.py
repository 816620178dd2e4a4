"""Stop requests from real signals, a lost parent and a clock set by hand; steps that are not
finite, as they are read from the device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samples import sampled

import megatron
from megatron.engine.train_engine import StepResult
from megatron.training.report import Reporter
from megatron.training.stopping import (
    STOP_SIGNALS,
    DelayedReads,
    NonFiniteGuard,
    Stopping,
    StopRequest,
    TrainingStopped,
)
from megatron.training.trainer import Step

SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(megatron.__file__).parents[1])}

WAIT_FOR_REQUEST = """
import os, sys, time
from megatron.training.stopping import StopRequest
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
def test_signal_is_recorded_and_named(number):
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name


@pytest.mark.parametrize("handled", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_closed_terminal_stops_a_run_unless_it_is_ignored(handled):
    """As `nohup` ignores it."""
    before = signal.signal(signal.SIGHUP, handled)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested == ("SIGHUP" if handled is signal.SIG_DFL else None)
        assert signal.getsignal(signal.SIGHUP) is handled
    finally:
        signal.signal(signal.SIGHUP, before)


def test_first_signal_is_the_one_named():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGUSR1"


def test_previous_handlers_are_restored():
    def handler(number, frame):
        raise AssertionError

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyError), StopRequest():
            # A Ctrl-C changes a handler, too.
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
        "from megatron.training.stopping import StopRequest\n"
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


SIGNALLED_AFTER_TRAINING = """
import os, signal
from contextlib import nullcontext
from megatron.run.process import ending_process
from megatron.training.stopping import StopRequest
with {context}:
    with StopRequest() as stop:
        assert stop.requested is None
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("context", "status"), [("ending_process()", 0), ("nullcontext()", -signal.SIGTERM)]
)
def test_a_program_that_has_trained_is_not_killed_by_a_late_signal(context, status):
    """A scheduler signals ranks one after the other, and the first may have told the others."""
    words = [sys.executable, "-c", SIGNALLED_AFTER_TRAINING.format(context=context)]
    assert subprocess.run(words, env=ENVIRONMENT, check=False).returncode == status


@pytest.mark.parametrize("launcher", sampled([True, False], bool))
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


CPU = torch.device("cpu")


def result(
    held: float | bool = 0.0, loss: float = 1.0, scale: float = 1.0, exhausted: bool = False
) -> StepResult:
    flag = held if isinstance(held, bool) else torch.tensor(held)
    total = torch.tensor(loss, dtype=torch.float64)
    return StepResult(total, {"lm loss": total}, torch.tensor(2.0), flag, scale, exhausted)


class Guard(NonFiniteGuard):
    """Works without a trainer."""

    def add(self, result: StepResult, iteration: int, first_sample: int, samples: int) -> None:
        step = Step(result, iteration, first_sample, samples, 16, 1e-3, 0.1)
        self.after_step(None, step)  # type: ignore[arg-type]

    def settle_all(self, at_end: bool = False) -> None:
        self.settle(SimpleNamespace(at_end=at_end))  # type: ignore[arg-type]


def guard(lag: int = 0, fp16: bool = False, check: bool = True, **options: Any) -> Guard:
    found = Guard(CPU, fp16, check, **options)
    found._reads = DelayedReads(lag)
    return found


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_values_come_back_in_order_after_the_lag(lag):
    reads = DelayedReads(lag)
    seen = []
    for number in range(5):
        reads.add(number, torch.tensor([float(number)]))
        seen += reads.due()
    assert seen == [(n, [float(n)]) for n in range(5 - lag)]
    seen += reads.due(everything=True)
    assert seen == [(n, [float(n)]) for n in range(5)]


def test_bad_step_is_named_late():
    steps = guard(lag=2)
    for number, held in enumerate((0.0, 1.0, 1.0), start=1):
        steps.add(result(held), number, 8 * (number - 1), 8)
    with pytest.raises(TrainingStopped, match="not finite at iteration 2, samples 8 to 15"):
        steps.add(result(1.0), 4, 24, 8)


def test_settling_does_not_wait_for_further_steps():
    steps = guard(lag=2)
    steps.add(result(1.0, float("nan")), 1, 0, 8)
    steps.add(result(), 2, 8, 8)
    with pytest.raises(TrainingStopped, match="the loss is nan at iteration 1, samples 0 to 7"):
        steps.settle_all()


@pytest.mark.parametrize("lag", [0, 1, 2, 9])
@pytest.mark.parametrize("known", [False, True])
def test_a_step_is_judged_before_the_next_one(lag, known):
    """Also where several are read at once, or the CPU knows of one that it was skipped."""
    steps, judged = guard(lag), []
    steps.judges.append(lambda trainer, step, *numbers: judged.append((step.iteration, *numbers)))
    with pytest.raises(TrainingStopped, match="the loss is nan at iteration 4"):
        for number in (1, 2, 3):
            steps.add(result(0.0, number), number, 8 * number, 8)
        steps.add(result(known or 1.0, float("nan")), 4, 32, 8)
        steps.add(result(0.0, 5), 5, 40, 8)
        steps.settle_all()
    assert judged == [(number, number, 2.0) for number in (1, 2, 3)]


def test_large_loss_is_not_infinite():
    with pytest.raises(TrainingStopped, match="the gradients are not finite"):
        guard().add(result(1.0, 1e300), 1, 0, 8)


def test_what_the_cpu_knows_is_judged_at_once():
    steps = guard(lag=2, fp16=True)
    steps.add(result(False, float("nan")), 1, 0, 8)
    steps.add(result(True), 2, 8, 8)  # an overflow of the scale
    with pytest.raises(TrainingStopped, match="iteration 3"):
        steps.add(result(True, float("inf")), 3, 16, 8)


def test_unchecked_steps_may_be_bad():
    steps = guard(check=False)
    steps.add(result(1.0, float("nan")), 1, 0, 8)
    steps.settle_all()


@pytest.mark.parametrize("lag, fp16", [(0, True), (2, False)])
def test_steps_skipped_in_a_row_end_the_run(lag, fp16):
    steps = guard(lag, fp16, check=False, most=3)
    for number, held in enumerate((1.0, 1.0, 0.0, 1.0, 1.0), start=1):
        steps.add(result(held), number, 8 * (number - 1), 8)
    where = "3 steps in a row were skipped .--max-skipped-steps 3.: the loss is nan at iteration 6"
    with pytest.raises(TrainingStopped, match=where):
        steps.add(result(1.0, float("nan")), 6, 40, 8)
        steps.settle_all()


def test_steps_may_be_skipped_without_limit():
    steps = guard(check=False, most=0)
    for number in range(1, 200):
        steps.add(result(1.0), number, number, 1)


@pytest.mark.parametrize("check", [True, False])
def test_an_overflow_at_the_smallest_scale_is_named(check):
    steps = guard(fp16=True, check=check, most=50, newest=lambda: "the last good checkpoint is a")
    steps.add(result(True, scale=2.0), 1, 0, 8)
    with pytest.raises(TrainingStopped, match="at iteration 2, samples 8 to 15") as caught:
        steps.add(result(True, scale=1.0, exhausted=True), 2, 8, 8)
    assert "the loss scale, 1, is already the smallest" in str(caught.value)
    assert "the last good checkpoint is a" in str(caught.value)


def test_a_training_that_changes_no_weight_fails_at_its_end():
    steps = guard(check=False, fresh=True)
    steps.add(result(True), 1, 0, 8)
    steps.settle_all()
    with pytest.raises(TrainingStopped, match="all 1 steps were skipped"):
        steps.settle_all(at_end=True)
    steps.add(result(False), 2, 8, 8)
    steps.add(result(True), 3, 16, 8)
    steps.settle_all(at_end=True)


def test_a_short_training_whose_first_scale_was_too_large_says_so(caplog):
    steps = guard(fp16=True, fresh=True)
    steps.add(result(True), 1, 0, 8)
    steps.settle_all(at_end=True)
    steps.settle_all(at_end=True)
    (told,) = caplog.messages
    assert "all 1 steps were skipped" in told and "--initial-loss-scale" in told


def test_a_ruined_model_is_not_called_unchanged():
    steps = guard(ruined=lambda: "w has 1 of 9 elements that are not finite")
    with pytest.raises(TrainingStopped, match="ruined before it, since w has 1 of 9") as caught:
        steps.add(result(True, float("nan")), 4, 12, 4)
    assert "as they were" not in str(caught.value)


def test_a_single_process_stops_on_its_own_request():
    request, trainer = SimpleNamespace(requested=None), SimpleNamespace(iteration=1, at_end=False)
    alone = Stopping(request, CPU, 1, None)
    assert alone.reason_to_stop(trainer) is None
    request.requested = "SIGTERM"
    assert alone.reason_to_stop(trainer) == "SIGTERM"


def test_kill_switch_file_stops_a_run_and_keeps_the_next_from_starting(tmp_path):
    switch = tmp_path / "stop"
    stop = StopRequest(kill_switch=str(switch))
    assert stop.requested is None
    switch.touch()
    assert stop.requested == f"--kill-switch-file {switch}"
    with pytest.raises(TrainingStopped, match=f"--kill-switch-file {switch} exists.*delete it"):
        StopRequest(kill_switch=str(switch))


@pytest.mark.parametrize(
    ("reason", "environment", "loud"),
    [
        ("SIGINT", {"LOCAL_RANK": "0"}, True),
        ("SIGINT", {"LOCAL_RANK": "0", SIGNALS: "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}, True),
        ("SIGINT", {"LOCAL_RANK": "0", SIGNALS: "SIGQUIT"}, False),
        ("SIGINT", {}, False),
        ("SIGTERM", {"LOCAL_RANK": "0"}, False),
    ],
    ids=["deepspeed", "torchrun", "own launcher", "one process", "another signal"],
)
def test_a_launchers_traceback_after_ctrl_c_is_announced(
    reason, environment, loud, monkeypatch, capsys
):
    for name in ("LOCAL_RANK", SIGNALS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    reporter = Reporter.__new__(Reporter)
    reporter.main, reporter.after_line = True, []
    reporter._bar = reporter.writer = SimpleNamespace(close=lambda: None)
    reporter.training_ended(SimpleNamespace(iteration=7), reason)
    said = capsys.readouterr().out
    assert f"stopped by {reason} after iteration 7" in said and "launcher" not in said
    reporter.__exit__(None)
    said = capsys.readouterr().out
    assert ("the launcher's, and says nothing about the run" in said) == loud
