"""The processes of the suite, seen by the one that starts them: a worker, and pytest."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contestants.process import environment, visible_gpu

from gpu_suite.ladder import GPU_TESTS
from gpu_suite.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu.py"
PYTEST_FLAGS = ("-v", "-rfE", "--durations=10", "--tb=short")
VERDICT = re.compile(r"(tests/gpu/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
"""A line of ``pytest -v``."""


class WorkerDied(Exception):
    """The worker ended; the message says how."""


class OutOfTime(Exception):
    """There was no answer in time; the process has been ended. ``found`` is what it had found."""

    def __init__(self, found: dict[str, Any] | None = None) -> None:
        super().__init__("there was no answer in time")
        self.found = found or {}


class Worker:
    """A worker, started; ``machine`` is its description of the machine.

    Args:
        log: file that gets what it prints.
        cache: folder of torch.compile's cache, kept for the next process.
        timeout: seconds to start in.

    Raises:
        WorkerDied: it did not start.
        OutOfTime: it took too long.
    """

    def __init__(self, log: Path, cache: Path, timeout: float) -> None:
        self.log = log
        variables = environment(SHAPES["tiny"].setting(), tuned_malloc=False)
        paths = [str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
        variables |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("ab") as errors:
            self.begin = errors.tell()
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
                cwd=ROOT,
                start_new_session=True,
            )
        self._unread = b""
        self.machine: dict[str, Any] = self._answer(timeout)

    def ask(self, request: str, timeout: float) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            WorkerDied: it ended instead; the message says how.
            OutOfTime: there was none within ``timeout`` seconds.
        """
        assert self.process.stdin is not None
        self.begin = self.log.stat().st_size
        with contextlib.suppress(OSError):  # it has ended; the answer that is missing says so
            self.process.stdin.write(f"{request}\n".encode())
            self.process.stdin.flush()
        return self._answer(timeout)

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.close()
                raise OutOfTime
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                status = self.process.wait()
                self.close()
                raise WorkerDied(f"exit status {status}: {(self.said(1) or [''])[-1][:300]}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def said(self, lines: int = 40) -> list[str]:
        """The last lines that it printed about the last request."""
        with self.log.open("rb") as file:
            file.seek(self.begin)
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def close(self) -> None:
        """Ends it, with all that it started; does nothing the second time."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def gpu_tests(arguments: Sequence[str], log: Path, timeout: float) -> dict[str, Any]:
    """A cell of tests, with what pytest there is.

    Args:
        arguments: of pytest: what it is to run.
        log: gets what pytest says, after what it has.
        timeout: in seconds.

    Raises:
        OutOfTime: they took longer; with the tests that had failed, and the end of the log.
    """
    if importlib.util.find_spec("pytest") is None:
        return {"summary": "pytest is not installed", "status": None}
    if not GPU_TESTS.is_dir():
        return {"summary": "this tree has no tests/gpu", "status": None}
    command = [sys.executable, "-m", "pytest", *arguments, *PYTEST_FLAGS]
    status = None
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=ROOT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # all that was said is in the log
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with log.open("rb") as file:
        file.seek(begin)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    end = lines[-80:]
    if status is None:
        ended = [match for match in map(VERDICT.match, lines) if match]
        broken = [f"{match[2]} {match[1]}" for match in ended if match[2] in ("FAILED", "ERROR")]
        counts = Counter(match[2].lower() for match in ended)
        summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        raise OutOfTime({"summary": summary or "no test ended", "broken": broken, "log": end})
    broken = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"summary": (lines or [""])[-1], "status": status, "broken": broken, "log": end}


class Sampler:
    """Clocks, power and temperature of the GPU, twice a second, while the block runs; none without
    nvidia-smi."""

    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")

    def __enter__(self) -> Sampler:
        command = [
            "nvidia-smi", f"--query-gpu={','.join(self.FIELDS)}",
            "--format=csv,noheader,nounits", f"--id={visible_gpu()}", "--loop-ms=500",
        ]  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.found: dict[str, float] = {}
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.found = busiest(self.FIELDS, self.process.communicate()[0])


def busiest(fields: tuple[str, ...], text: str) -> dict[str, float]:
    """Medians over the quarter of the samples with the highest power: those of the steps, not of
    the start. A sample that lacks a number is left out."""
    samples = []
    for line in text.splitlines():
        try:
            samples.append([float(value) for value in line.split(",")])
        except ValueError:
            continue
    samples = [sample for sample in samples if len(sample) == len(fields)]
    if not samples:
        return {}
    samples.sort(key=lambda sample: -sample[fields.index("power.draw")])
    best = samples[: max(1, len(samples) // 4)]
    middle = len(best) // 2
    return {name: sorted(s[n] for s in best)[middle] for n, name in enumerate(fields)}
