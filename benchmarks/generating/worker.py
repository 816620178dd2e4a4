"""A program's process: generates for the requests of each line that it reads.

    PYTHON worker.py PROGRAM '{"folder": ..., "threads": 1, ...}'

It answers a line of JSON with a line of JSON. It imports nothing of the project, so that a program
may have an environment of its own; what libraries print goes to the standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from generating.load import Request  # noqa: E402

PROGRAMS = {
    "ours": "generating.ours:Ours",
    "generate": "generating.transformers_static:Static",
    "generate-sorted": "generating.transformers_static:Sorted",
    "generate_batch": "generating.transformers_continuous:Continuous",
    "llama.cpp": "generating.llama_cpp_program:LlamaCpp",
    "vllm": "generating.vllm_program:Vllm",
}
"""Module of each class."""


class Program(Protocol):
    """A loaded model. Its constructor gets the folder of the model, in Hugging Face's form, the
    number of threads, the most requests at once, and the most tokens of one."""

    def run(
        self, requests: Sequence[Request], concurrency: int, first: Callable[[int], None]
    ) -> list[list[int]]:
        """The new tokens of each request, ``concurrency`` of them at a time; all have arrived.
        Calls ``first`` with a request's place when its first new token is known."""
        ...


class Watch:
    """When first tokens came: seconds since the start, of the process's threads and on the clock.
    On one thread the former is what the latter would be on a machine that does nothing else."""

    def __init__(self, count: int) -> None:
        self.firsts: list[tuple[float, float] | None] = [None] * count
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def first(self, place: int) -> None:
        """A request's first token is known."""
        if self.firsts[place] is None:
            self.firsts[place] = self.passed()

    def passed(self) -> tuple[float, float]:
        """Seconds until now."""
        return time.process_time() - self.cpu, time.perf_counter() - self.wall


def measure(program: Program, requests: Sequence[Request], concurrency: int) -> dict[str, Any]:
    """Return time and memory of a run, and its tokens."""
    _reset_peak()
    watch = Watch(len(requests))
    tokens = program.run(requests, concurrency, watch.first)
    cpu, wall = watch.passed()
    assert all(watch.firsts), "a request without a first token"
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "peak_bytes": _memory("VmHWM"),
        "first_cpu": [first[0] for first in watch.firsts if first],
        "first_wall": [first[1] for first in watch.firsts if first],
        "tokens": tokens,
        **getattr(program, "facts", dict)(),
    }


def _reset_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the highest resident size is the current one again (proc(5))
    except OSError:
        pass  # then it is that of the process's whole life


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[name].split()[0]) * 1024


def main(name: str, settings: str) -> None:
    """Answers until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        module, _, member = PROGRAMS[name].partition(":")
        program = getattr(importlib.import_module(module), member)(**json.loads(settings))
        answer({"ready": True, "resident_bytes": _memory("VmRSS")})
        for line in sys.stdin:
            asked = json.loads(line)
            requests = [Request(*request) for request in asked["requests"]]
            answer(measure(program, requests, asked["concurrency"]))
    except Exception as error:
        traceback.print_exc()
        answer({"failed": f"{type(error).__name__}: {error}"[:300]})
    sys.stdout.flush()
    os._exit(0)  # what libraries would still tidy up is no part of this


if __name__ == "__main__":
    main(*sys.argv[1:])
