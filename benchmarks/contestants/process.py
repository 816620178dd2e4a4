"""Contestants as processes: started, told to run a round, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contestants.setting import Setting

PROGRAM = Path(__file__).resolve().parents[1] / "train.py"
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""Settings of the trainer for itself, as mallopt(3) reads them from the environment."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Torch's allocator for GPUs; the trainer sets the first one unless the user sets one of them."""


class ContestantError(Exception):
    """A contestant ended, or said nothing in time; the message says why."""


class MissingPackage(ContestantError):
    """It needs something that is not installed."""


def visible_gpu() -> str:
    """The GPU that contestants see, as CUDA_VISIBLE_DEVICES and nvidia-smi name it; may be none."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def environment(setting: Setting, tuned_malloc: bool) -> dict[str, str]:
    """Variables of a contestant's process."""
    result = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    # One GPU; with several in sight transformers' Trainer would cut its batches over them.
    result["CUDA_VISIBLE_DEVICES"] = visible_gpu()
    if not any(map(result.get, ALLOCATOR)):
        result[ALLOCATOR[0]] = "expandable_segments:True"
    threads = str(setting.threads)
    result |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    result |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "DS_LOG_LEVEL": "warning"}
    return result | TUNED if tuned_malloc else result


class Process:
    """A contestant, which warms itself up while the constructor waits.

    Args:
        name: of the registry, with extra flags.
        setting: what it trains.
        environment: its variables.
        timeout: seconds until it is ready, and for each round.

    Raises:
        ContestantError: it did not start.
    """

    def __init__(
        self, name: str, setting: Setting, environment: dict[str, str], timeout: float
    ) -> None:
        self.name, self.timeout = name, timeout
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--contestant", name, setting.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            start_new_session=True,
        )
        self._unread = b""
        ready = self._answer()
        if "missing" in ready:
            self.close()
            raise MissingPackage(f"{', '.join(ready['missing'])} not installed")
        self.warmup_losses: list[float | None] = ready["losses"]
        self.start_seconds = time.monotonic() - began

    def round(self) -> dict[str, Any]:
        """Measures a round.

        Raises:
            ContestantError: it ended, or took longer than the timeout.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"round\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended; the answer that is missing says so
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.close()
                raise ContestantError(f"no answer within {self.timeout:.0f} s")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                why = self._last_line()
                self.close()
                raise ContestantError(why)
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _last_line(self) -> str:
        """Return its last line of output, which for a Python error is the error."""
        status = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        said = next((line for line in reversed(lines) if "Error" in line), (lines or [""])[-1])
        return f"exit status {status}: {said[:300]}"

    def close(self) -> None:
        """Ends it, with all that it started; does nothing the second time."""
        if self.errors.closed:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def prepare(
    setting: Setting, steps: int, peak_flops: float | None, environment: dict[str, str]
) -> dict[str, Any]:
    """Has tokens and weights made; what is known of the machine. See `contestants.prepare`.

    Raises:
        ContestantError: it failed.
    """
    done = subprocess.run(
        [
            sys.executable,
            str(PROGRAM),
            "--prepare",
            setting.to_json(),
            str(steps),
            str(peak_flops or 0),
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ContestantError(f"the weights were not made: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
