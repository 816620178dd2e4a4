"""Faults of processes: signals to ranks and data workers, ranks that hang or die at any place."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from faults.fault import Fault
from faults.training import (
    DP2,
    DP2_ZERO1,
    DP2_ZERO2,
    DP2_ZERO3,
    DP4,
    HANG_SECONDS,
    ONE,
    PP2,
    PP2DP2,
    TP2,
    TP2DP2,
    Training,
)

STORE = "(?:, which has the store of the ranks,)?"
"""What a message may say of rank 0."""
HANGS = {
    "sleep": "sleeps",
    "loop": "loops in Python",
    "lock": "waits for a lock",
    "hold": "is in a call that keeps the interpreter's lock",
    "compute": "multiplies matrices without end",
}
DEATHS = {
    "raise": "raises an error of a kernel",
    "exit": "ends with status 5",
    "segfault": "reads address 0",
    "abort": "aborts",
    "kill": "is killed by SIGKILL",
    "exhaust": "asks for more memory than its limit",
}
PLACES = {"start": "while it starts", "save": "in a save", "evaluation": "in an evaluation"}
PLACES_LOADING = {**PLACES, "load": "while it loads a checkpoint"}


def send(number: int, *ranks: int) -> Callable[[Training, Any], object]:
    """Sends a signal to ranks."""
    return lambda training, tools: training.signal(number, *ranks)


def stopped() -> Iterator[Fault]:
    """SIGSTOP of each rank, in each layout."""
    for shape in (DP2, DP2_ZERO1, DP2_ZERO2, DP2_ZERO3, TP2, PP2, DP4, TP2DP2, PP2DP2):
        for rank in sorted({0, shape.size - 1}):
            short = shape.name.replace(" ", "-").replace(",", "").lower()
            yield Fault(
                f"stop-rank-{rank}-{short}",
                f"SIGSTOP of rank {rank}",
                rf"rank {rank} \([^)]*\){STORE} does not answer",
                send(signal.SIGSTOP, rank),
                shape=shape,
                limit=HANG_SECONDS,
                culprits=frozenset((rank,)),
                victims=frozenset((rank,)),
            )


def hanging() -> Iterator[Fault]:
    """A rank that hangs, in each way and each phase."""
    for what, words in HANGS.items():
        silent = what == "hold"
        for rank in (0, 1):
            yield Fault(
                f"{what}-rank-{rank}",
                f"rank {rank} {words} in a step",
                rf"rank {rank} \([^)]*\){STORE} (does not answer|has not advanced)",
                inside=("step", rank, 8, what),
                limit=HANG_SECONDS,
                culprits=frozenset((rank,)),
                victims=frozenset((rank,) if silent else ()),
            )
    for place, words in PLACES_LOADING.items():
        yield Fault(
            f"sleep-in-{place}",
            f"rank 1 sleeps {words}",
            r"rank 1 \([^)]*\) has not advanced",
            inside=(place, 1, 10, "sleep"),
            limit=20.0 if place == "save" else 12.0 if place in ("start", "load") else HANG_SECONDS,
            culprits=frozenset((1,)),
            earlier=place == "load",
            flags=("--save-interval", "5", "--hang-limits", "start=12", "save=20"),
            data=("--eval-iters", "1", "--eval-interval", "8") if place == "evaluation" else (),
        )


def dying() -> Iterator[Fault]:
    """A rank that ends, in each way and in each phase."""
    for what, words in DEATHS.items():
        for rank in (0, 1):
            yield Fault(
                f"{what}-in-rank-{rank}",
                f"rank {rank} {words} in a step",
                rf"rank {rank}\b[^\n]* has ended",
                inside=("step", rank, 8, what),
                limit=0.0,
                culprits=frozenset((rank,)),
                # all ranks end with the status of an error that one has raised
                statuses=frozenset((1, 2)) if what in ("raise", "exhaust") else frozenset((3,)),
                victims=frozenset((rank,)),
            )
    for place, words in PLACES_LOADING.items():
        yield Fault(
            f"kill-in-{place}",
            f"rank 1 is killed by SIGKILL {words}",
            r"rank 1\b[^\n]* has ended",
            inside=(place, 1, 10, "kill"),
            culprits=frozenset((1,)),
            victims=frozenset((1,)),
            earlier=place == "load",
            data=("--eval-iters", "1", "--eval-interval", "8") if place == "evaluation" else (),
        )
    for shape in (TP2, PP2, DP4, TP2DP2):
        rank = shape.size - 1
        short = shape.name.replace(" ", "-").replace(",", "").lower()
        yield Fault(
            f"kill-{short}",
            f"SIGKILL of rank {rank}",
            rf"rank {rank}\b[^\n]* has ended",
            send(signal.SIGKILL, rank),
            shape=shape,
            culprits=frozenset((rank,)),
            victims=frozenset((rank,)),
        )


def asked_to_stop() -> Iterator[Fault]:
    """Signals by which people and schedulers stop a run."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        for shape in (ONE, DP2):
            yield Fault(
                f"{number.name.lower()}-{shape.size}",
                f"{number.name} to rank {shape.size - 1}",
                f"stopped by {'a request to another rank' if shape.size > 1 else number.name}",
                send(number, shape.size - 1),
                shape=shape,
                statuses=frozenset((0,)),
            )


def terminate_stopped_peer(training: Training, tools: object) -> None:
    training.signal(signal.SIGSTOP, 1)
    training.signal(signal.SIGTERM, 0)


def stop_worker(training: Training, tools: object) -> None:
    os.kill(training.workers(training.layout.size - 1)[0], signal.SIGSTOP)


def kill_worker(training: Training, tools: object) -> None:
    os.kill(training.workers(training.layout.size - 1)[0], signal.SIGKILL)


def suspend_all(training: Training, tools: object) -> None:
    """For longer than the limit."""
    import time

    everything = [pid for rank in range(training.layout.size) for pid in training.workers(rank)]
    training.signal(signal.SIGSTOP)
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(HANG_SECONDS + 6)
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    training.signal(signal.SIGCONT)


def others() -> Iterator[Fault]:
    workers = ("--num-workers", "1", "--save-interval", "5")
    for shape in (ONE, DP2):
        last = shape.size - 1
        yield Fault(
            f"stop-worker-{shape.size}",
            f"SIGSTOP of a data worker of rank {last}",
            r"(?i)rank \d+[^\n]*process \d+ of --num-workers, which is stopped",
            stop_worker,
            shape=shape,
            flags=workers,
            limit=HANG_SECONDS,
            culprits=frozenset((last,)),
        )
        yield Fault(
            f"kill-worker-{shape.size}",
            f"SIGKILL of a data worker of rank {last}",
            r"process \d+ of --num-workers, which reads data, was killed by SIGKILL",
            kill_worker,
            shape=shape,
            flags=workers,
            statuses=frozenset((1, 3)),  # torchrun has its own
        )
        yield Fault(
            f"suspend-{shape.size}",
            f"all processes stopped for {HANG_SECONDS + 6} s and continued (no alarm)",
            r"iteration +40/",
            suspend_all,
            shape=shape,
            flags=workers,
            limit=60.0,
            statuses=frozenset(),
            culprits=frozenset(),
        )
    yield Fault(
        "term-while-peer-stopped",
        "SIGSTOP of rank 1, SIGTERM to rank 0",
        r"rank 1 \([^)]*\) does not answer",
        terminate_stopped_peer,
        limit=HANG_SECONDS,
        culprits=frozenset((1,)),
        victims=frozenset((1,)),
    )


RANKS = (*stopped(), *hanging(), *dying(), *asked_to_stop(), *others())
