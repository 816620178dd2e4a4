"""A worker: a process that measures one cell after another.

It reads a request a line and answers with a line of JSON; the first line, unasked, describes the
machine. What libraries print goes to its log. Between two cells it frees what the last one had.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from gpu_suite.ladder import BASE, CEILINGS, FP8, GENERATION, GRAPHS, MACHINE, RANKS, SLACK, Cell

Found = dict[str, Any]


def serve() -> None:
    """Answers until the input ends."""
    from contestants.worker import _end_with_parent

    _end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from gpu_suite.device import describe

    _answer(answers, describe())
    for line in sys.stdin:
        request = json.loads(line)
        print(f"--- {Cell(**request['cell']).name}", file=sys.stderr, flush=True)
        _answer(answers, answer(request))
    sys.stdout.flush()
    os._exit(0)  # what libraries would still tidy up is no part of this


def answer(request: Found) -> Found:
    """Answer a request with its result: ``cell``, ``trace`` (its file) and ``about`` (for the
    trace). Anything that goes wrong is ``failed``, a line; ``restart`` asks for a new process."""
    from gpu_suite.training import Room, free, train

    cell = Cell(**{**request["cell"], "without": tuple(request["cell"]["without"])})
    heard = _Ears(sys.stderr)
    sys.stderr = heard
    try:
        if cell.group == MACHINE:
            from gpu_suite.device import environment

            found: Found = environment()
        elif cell.group == CEILINGS:
            from gpu_suite.ceilings import ceilings

            found = ceilings()
        elif cell.group == GRAPHS:
            from gpu_suite.graphs import graph_counts
            from gpu_suite.shapes import SHAPES

            found = graph_counts(SHAPES["1.3B"].setting(), {"bf16": BASE, "fp8": BASE + FP8})
        elif cell.group == RANKS:
            from gpu_suite.ranks import on_one_card

            found = on_one_card(SLACK * cell.fixed)
        elif cell.group == GENERATION:
            from gpu_suite.generation import generation

            found = generation(cell.variant)
        else:
            found = train(cell, Path(request["trace"]), request["about"], Room.of_device())
    except SystemExit as error:
        found = {"failed": f"exit status {error.code}: {heard.last_line()}"}
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        found = {"failed": f"{type(error).__name__}: {text}"[:300]}
        found["restart"] = not isinstance(error, ValueError)
    finally:
        sys.stderr = heard.stream
    try:
        found["left_bytes"] = free()
    except Exception as error:  # after an error of the device nothing works in this process
        found |= {"restart": True, "not_freed": str(error)[:300]}
    return found


class _Ears(io.TextIOBase):
    """Passes on what is written, and remembers the end of it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.kept = stream, ""

    def write(self, text: str, /) -> int:
        self.kept = (self.kept + text)[-4000:]
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def last_line(self) -> str:
        lines = [line.strip() for line in self.kept.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "error" in line.lower()), "")
        return (said or (lines or [""])[-1])[:300]


def request_of(cell: Cell, trace: Path, about: Found) -> str:
    """The line that asks for a cell."""
    return json.dumps({"cell": dataclasses.asdict(cell), "trace": str(trace), "about": about})


def _answer(answers: TextIO, found: Found) -> None:
    print(json.dumps(found), file=answers, flush=True)
