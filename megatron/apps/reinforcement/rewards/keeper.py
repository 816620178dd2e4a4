"""Process that computes rewards in confined processes, for one rank of a run.

It reads requests from its standard input, writes an answer to each, and ends when its input is
closed. Messages are JSON objects, each preceded by its length in 8 bytes:

    call      call a Python function with trl's arguments, in a process that is kept for later calls
    run       run a program, and answer with its output
    code      run code and its tests, each test in a new process that first runs the code
    probe     list the limits that this node does not enforce

It is started by ``python -m`` and imports only the standard library, so that forks are cheap.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import secrets
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron.apps.reinforcement.rewards import function_process
from megatron.apps.reinforcement.rewards.box import OUTPUT_BYTES, Box, remove, sweep
from megatron.apps.reinforcement.rewards.confinement import Limits
from megatron.apps.reinforcement.rewards.probe import unenforced

FOLDER = "megatron-rewards-"
"""Prefix of the temporary folder that the trainer creates for a keeper process."""
_START_SECONDS = 120.0
"""Time limit, in seconds, for the imports of a function's file."""


class Keeper:
    """Confined processes of one rank, and the answers to requests to them."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], Box] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request of a kind described in this module's docstring."""
        limits = Limits(**request["limits"])
        kinds: dict[str, Callable[[Mapping[str, Any], Limits], dict[str, Any]]] = {
            "call": self._call, "run": self._run, "code": self._code,
            "probe": lambda request, limits: dict(unenforced(limits)),
        }  # fmt: skip
        try:
            return kinds[request["kind"]](request, limits)
        finally:
            sweep({box.warden for box in self._functions.values()})

    def close(self) -> None:
        """End all processes."""
        for box in self._functions.values():
            box.end()
        self._functions.clear()

    def _call(self, request: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
        key = request["file"], request["function"]
        box = self._functions.get(key)
        if box is None:
            box = Box.start(limits, lambda: function_process.serve(*key))
            self._functions[key] = box
            answer, problem = self._ask(box, {}, _START_SECONDS)
            if answer is None or "failure" in answer:
                del self._functions[key]
                box.end()
                known = answer or {"failure": _why(problem or "ended", box, limits)}
                return {"failure": f"cannot be loaded: {known['failure']}", "loaded": False}
        if "arguments" not in request:
            return {"loaded": True}
        answer, problem = self._ask(box, request["arguments"], limits.seconds)
        if answer is None:
            answer = {"failure": _why(problem or "ended", box, limits)}
        # Reuse the process only if the target is alive and has no child processes left.
        if problem or box.status is not None or len(box.processes()) > 1:
            del self._functions[key]
            box.end()
        return answer

    def _ask(
        self, box: Box, request: Mapping[str, Any], seconds: float
    ) -> tuple[dict[str, Any] | None, str | None]:
        """Send a request to a function's process. Return the answer, or None, and the name of the
        exceeded limit, or None."""
        token = secrets.token_hex(8)
        content = json.dumps({"token": token, **request}).encode()
        for part in box.output.values():
            part.clear()
        box.lengths = dict.fromkeys(box.output, 0)
        box.send(struct.pack("<Q", len(content)) + content)
        answer: list[dict[str, Any]] = []

        def done() -> bool:
            data = box.output[3]
            if len(data) < 8 or len(data) < 8 + (length := struct.unpack("<Q", data[:8])[0]):
                return False
            with contextlib.suppress(ValueError, RecursionError):
                known = json.loads(data[8 : 8 + length])
                if isinstance(known, dict) and known.pop("token", None) == token:
                    answer.append(known)
            return True

        problem = box.watch(time.monotonic() + seconds, done)
        if problem is None and not answer and box.status is None:
            problem = "answer"
        return (answer[0] if answer else None), problem

    def _run(self, request: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
        words = request["words"]
        box = Box.start(limits, lambda: os.execvp(words[0], words))
        try:
            box.closes = True
            data = request["input"].encode()
            if data:
                box.send(data)
            else:
                box.close_input()
            problem = box.watch(time.monotonic() + limits.seconds, lambda: False)
            if problem is None and box.status:
                problem = "ended"
            if problem:
                return {"failure": _why(problem, box, limits)}
            return {"output": base64.b64encode(bytes(box.output[1])).decode()}
        finally:
            box.end()

    def _code(self, request: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
        """Run the tests of some code. A test is a string of statements, which pass if they raise
        nothing, or an object with input and expected output. The time limit applies to all tests
        together."""
        ends = time.monotonic() + limits.seconds
        passed, messages = [], []
        for test in request["tests"]:
            left = max(0.0, ends - time.monotonic())
            token = secrets.token_hex(16)
            code, of_text = request["code"], isinstance(test, str)
            target = _statements(code, test, token) if of_text else _program(code)
            box = Box.start(limits, target)
            try:
                box.closes = True
                asked = "" if of_text else str(test["input"])
                box.send(asked.encode()) if asked else box.close_input()
                problem = box.watch(time.monotonic() + left, lambda: False) if left else "time"
                if of_text:
                    good = bytes(box.output[3]) == token.encode()
                else:
                    good = not box.status and _lines(box.output[1]) == _lines(
                        str(test["output"]).encode()
                    )
                passed.append(problem is None and good)
                if not passed[-1]:
                    messages.append(_why(problem or "ended", box, limits))
            finally:
                box.end()
        return {"passed": passed, "messages": messages[:1]}


def _statements(code: str, test: str, token: str) -> Callable[[], None]:
    def run() -> None:
        names: dict[str, Any] = {"__name__": "solution"}
        exec(compile(code, "solution", "exec"), names)  # noqa: S102  # the process is confined
        exec(compile(test, "test", "exec"), names)  # noqa: S102
        os.write(3, token.encode())

    return run


def _program(code: str) -> Callable[[], None]:
    def run() -> None:
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        exec(compile(code, "solution", "exec"), {"__name__": "__main__"})  # noqa: S102
        sys.stdout.flush()

    return run


def _lines(output: bytes | bytearray) -> list[bytes]:
    """Split output into lines, without trailing spaces and without empty lines at the end."""
    return [line.rstrip() for line in bytes(output).rstrip().split(b"\n")]


def _why(problem: str, box: Box, limits: Limits) -> str:
    """Return a message that explains why a process failed."""
    mib = limits.memory >> 20
    said = _text(box.output[2])
    if problem == "time":
        return f"took more than {limits.seconds:g} s (--reward-timeout)"
    if problem == "memory" or "MemoryError" in said[-200:]:
        return f"needed more than {mib} MiB of memory (--reward-memory-mib)"
    if problem == "processes":
        return f"started more than {limits.processes} processes"
    if problem == "files":
        return f"wrote more than {4 * limits.file_bytes >> 20} MiB, or 4096 files"
    if problem == "output":
        return f"printed more than {OUTPUT_BYTES >> 20} MiB"
    if problem == "answer":
        return "answered with something else than rewards"
    status = box.status
    how = "ended without an answer" if not status else f"ended with status {status}"
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            how = f"was killed by {signal.Signals(-status).name}"
    last = said.strip().splitlines()[-1:] if said.strip() else []
    return f"{how}{': ' if last else ''}{''.join(last)[:300]}"


def _text(output: bytes | bytearray) -> str:
    return bytes(output[-4000:]).decode("utf-8", "replace")


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.path and not sys.path[0]:
        del sys.path[0]
    keeper, trainer = Keeper(), os.getppid()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        while len(head := requests.read(8)) == 8:
            request = json.loads(requests.read(struct.unpack("<Q", head)[0]))
            try:
                answer = keeper.answer(request)
            except OSError as error:
                answer = {"failure": f"cannot be computed: {error}"}
            content = json.dumps(_finite(answer)).encode()
            answers.write(struct.pack("<Q", len(content)) + content)
            answers.flush()
    finally:
        keeper.close()
        folder = tempfile.gettempdir()
        if os.getppid() != trainer and os.path.basename(folder).startswith(FOLDER):
            remove(folder)


def _finite(answer: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities among an answer's values by strings, in place, so that it is valid
    JSON."""
    values = answer.get("values")
    if isinstance(values, list):
        answer["values"] = [
            repr(v) if isinstance(v, float) and not math.isfinite(v) else v for v in values
        ]
    return answer


if __name__ == "__main__":
    main()
