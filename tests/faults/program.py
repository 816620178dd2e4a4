"""A training command that can be tried: paced, in a network of its own, with a fault at a step.

``faults.program`` is ``pretrain_gpt.py`` with what the variable ``FAULTS_PLACE`` says about this
rank, a JSON object: ``namespace`` (of the network), ``pace`` (seconds of sleep in each step, so
that a tiny model lives long enough), and ``fault``, a list of place, rank, iteration and what
happens there. The product has no such branch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import deepspeed  # noqa: F401  # imported before the processes are forked
import torch
import torch._dynamo  # likewise: ZeRO 3 needs it

import pretrain_gpt
from megatron.engine.saving import CheckpointWriter
from megatron.engine.train_engine import TrainEngine
from megatron.training import build, resume
from megatron.training.trainer import Trainer

BEGUN = "here the fault begins"
"""Printed before a fault inside a rank."""
VARIABLE = "FAULTS_PLACE"


def main() -> None:
    """Trains."""
    settings = json.loads(os.environ.pop(VARIABLE, "{}"))
    if "namespace" in settings:
        _enter(settings["namespace"])
    _pace(settings.get("pace", 0.0))
    if "fault" in settings:
        place, rank, iteration, what = settings["fault"]
        if rank == int(os.environ["RANK"]):
            PLACES[place](iteration, WHAT[what])
    pretrain_gpt.main()


def _enter(namespace: str) -> None:
    """Moves this process into a network namespace."""
    opened = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(opened, 0x40000000):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(opened)
    if ctypes.CDLL(None, use_errno=True).unshare(0x04000000):  # a host name of its own
        raise OSError(ctypes.get_errno(), f"cannot name the host {namespace}")
    socket.sethostname(namespace)


def _pace(seconds: float) -> None:
    step = Trainer.step

    def paced(self: Trainer, batches: Any) -> None:
        time.sleep(seconds)
        step(self, batches)

    Trainer.step = paced  # type: ignore[method-assign]


Happens = Callable[[TrainEngine | None], object]
"""What happens in a place; it gets the engine where there is one."""


def _begin(happens: Happens, engine: TrainEngine | None) -> None:
    os.write(2, f"{BEGUN}\n".encode())
    happens(engine)


def _in_step(iteration: int, happens: Happens) -> None:
    step = Trainer.step

    def changed(self: Trainer, batches: Any) -> None:
        if self.iteration == iteration:
            _begin(happens, self.engine)
        step(self, batches)

    Trainer.step = changed  # type: ignore[method-assign]


def _from_step(iteration: int, happens: Happens) -> None:
    """In this step and all that follow."""
    step, begun = TrainEngine.train_step, []

    def changed(self: TrainEngine, *arguments: Any) -> Any:
        begun.append(True)
        if len(begun) == iteration:
            os.write(2, f"{BEGUN}\n".encode())
        if len(begun) >= iteration:
            happens(self)
        return step(self, *arguments)

    TrainEngine.train_step = changed  # type: ignore[method-assign]


def _after_step(iteration: int, happens: Happens) -> None:
    """Between the update of this step and what follows it."""
    step, done = TrainEngine.train_step, []

    def changed(self: TrainEngine, *arguments: Any) -> Any:
        result = step(self, *arguments)
        done.append(True)
        if len(done) == iteration:
            _begin(happens, self)
        return result

    TrainEngine.train_step = changed  # type: ignore[method-assign]


def _in_save(iteration: int, happens: Happens) -> None:
    save = CheckpointWriter.save

    def changed(self: CheckpointWriter, at: int, *rest: Any) -> None:
        if at == iteration:
            _begin(happens, None)
        save(self, at, *rest)

    CheckpointWriter.save = changed  # type: ignore[method-assign]


def _in_evaluation(iteration: int, happens: Happens) -> None:
    """In the first evaluation."""
    evaluate = TrainEngine.evaluate

    def changed(self: TrainEngine, *arguments: Any) -> Any:
        _begin(happens, self)
        return evaluate(self, *arguments)

    TrainEngine.evaluate = changed  # type: ignore[method-assign]


def _in_start(iteration: int, happens: Happens) -> None:
    """Where the engine is built."""
    before = build.build_engine

    def changed(*arguments: Any) -> Any:
        _begin(happens, None)
        return before(*arguments)

    build.build_engine = changed


def _in_load(iteration: int, happens: Happens) -> None:
    load = resume.load

    def changed(*arguments: Any) -> Any:
        _begin(happens, None)
        return load(*arguments)

    resume.load = changed


PLACES = {
    "step": _in_step,
    "steps": _from_step,
    "after": _after_step,
    "save": _in_save,
    "evaluation": _in_evaluation,
    "start": _in_start,
    "load": _in_load,
}


def _sleep(engine: object) -> None:
    time.sleep(3600)


def _nap(engine: object) -> None:
    time.sleep(2.0)


def _loop(engine: object) -> NoReturn:
    while True:
        pass


def _lock(engine: object) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_interpreter(engine: object) -> None:
    ctypes.PyDLL(None).sleep(3600)  # a call that keeps the interpreter's lock


def _compute(engine: object) -> NoReturn:
    matrix = torch.eye(512)
    while True:
        matrix = matrix @ matrix


def _raise(engine: object) -> NoReturn:
    raise RuntimeError("a kernel failed")


def _exit(engine: object) -> NoReturn:
    os._exit(5)


def _exit_well(engine: object) -> NoReturn:
    os._exit(0)


def _segfault(engine: object) -> None:
    ctypes.string_at(0)


def _abort(engine: object) -> None:
    os.abort()


def _exhaust(engine: object) -> None:
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, used + 2**20))
    torch.ones(2**24)


def _kill(engine: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _bits(values: torch.Tensor) -> torch.Tensor:
    integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return values.detach().view(-1).view(integers)


def _flip_weight(engine: TrainEngine | None) -> None:
    """One bit of a weight, the largest of its mantissa."""
    assert engine is not None
    first = next(iter(engine.names))
    bits = _bits(first.data)
    bits[3] ^= 1 << (6 if first.element_size() == 2 else 22)


def _nan_weight(engine: TrainEngine | None) -> None:
    assert engine is not None
    next(iter(engine.names)).data.view(-1)[3] = float("nan")


WHAT: dict[str, Callable[[Any], object]] = {
    "sleep": _sleep,
    "nap": _nap,
    "loop": _loop,
    "lock": _lock,
    "hold": _hold_interpreter,
    "compute": _compute,
    "raise": _raise,
    "exit": _exit,
    "exit well": _exit_well,
    "segfault": _segfault,
    "abort": _abort,
    "exhaust": _exhaust,
    "kill": _kill,
    "flip weight": _flip_weight,
    "nan weight": _nan_weight,
}

if __name__ == "__main__":
    sys.exit("tests/faults/run.py starts it")
