"""A contestant's process: trains, and measures a round of steps whenever it is told to.

It speaks a line of JSON at a time: ``ready`` with the losses of the warm-up, then an answer to each
line that it reads, until its input ends. What libraries print goes to the standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from typing import Any, NoReturn, TextIO

import torch

from contestants.registry import contestant
from contestants.setting import Setting


def compete(name: str, setting: Setting) -> NoReturn:
    """Runs a contestant until its standard input ends."""
    _end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    found = contestant(name)
    missing = found.missing()
    if missing:
        _answer(answers, {"missing": missing})
        _end()
    torch.set_num_threads(setting.threads)
    found.run(setting, Rounds(setting, answers).after_step)
    raise AssertionError("a contestant trains without end")


class Rounds:
    """Warm-up, then rounds: counts steps and measures them.

    Args:
        setting: how many steps there are in each.
        answers: where the answers go.
    """

    def __init__(self, setting: Setting, answers: TextIO) -> None:
        self.setting, self.answers = setting, answers
        self.clock: Clock | None = None
        self.left = setting.warmup
        self.losses: list[Any] = []

    def after_step(self, loss: Any, grad_norm: Any = None, /) -> None:
        """Callback after every step of a contestant; between rounds it does not return until it is
        time for the next one."""
        self.losses.append(loss)
        self.left -= 1
        if self.left:
            return
        answer: dict[str, Any] = {} if self.clock is None else self.clock.stop()
        answer["losses"] = [None if loss is None else float(loss) for loss in self.losses]
        _answer(self.answers, answer)
        if not sys.stdin.readline():
            _end()
        self.losses, self.left = [], self.setting.steps
        self.clock = Clock()


class Clock:
    """Time and memory from here to :meth:`stop`."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        _reset_peak(self.cuda)
        if self.cuda:
            self.begin = torch.cuda.Event(enable_timing=True)
            self.end = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            self.begin.record()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self) -> dict[str, float]:
        """Seconds since, by clock, of this process's threads, and of the GPU; and the most memory
        at any time in between, bytes."""
        result: dict[str, float] = {}
        if self.cuda:
            self.end.record()
            torch.cuda.synchronize()
            result["gpu_seconds"] = self.begin.elapsed_time(self.end) / 1e3
        result["cpu_seconds"] = time.process_time() - self.cpu
        result["wall_seconds"] = time.perf_counter() - self.wall
        result["peak_bytes"] = _peak_bytes(self.cuda)
        return result


def _reset_peak(cuda: bool) -> None:
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the highest resident size is the current one again (proc(5))
    except OSError:
        pass  # then it is that of the process's whole life


def _peak_bytes(cuda: bool) -> int:
    if cuda:
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _end_with_parent() -> None:
    """Has Linux end this process when the one that started it is killed."""
    death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(death_signal, signal.SIGKILL)


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def _end() -> NoReturn:
    # Not by an exception: what a contestant would still tidy up is no part of this, and takes time.
    os._exit(0)
