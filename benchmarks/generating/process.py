"""A program's process, from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contestants.process import TUNED

from generating.load import Request

WORKER = Path(__file__).with_name("worker.py")
ROOT = WORKER.parents[2]


class ProgramError(Exception):
    """A program did not do what it was asked; the message says why."""


class Process:
    """A program that has loaded the model.

    Args:
        name: of `worker.PROGRAMS`.
        python: the interpreter of its environment.
        settings: arguments of its class.

    Raises:
        ProgramError: it did not start.
    """

    def __init__(self, name: str, python: str, settings: dict[str, Any]) -> None:
        self.name = name
        threads = str(settings["threads"])
        environment = os.environ | TUNED | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_PROC_BIND": "false",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'compat'}" if python == sys.executable else "",
        }  # fmt: skip
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, str(WORKER), name, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env=environment,
        )  # fmt: skip
        try:
            self.resident_bytes = self._answer()["resident_bytes"]
        except ProgramError:
            self.close()
            raise

    def run(self, requests: Sequence[Request], concurrency: int) -> dict[str, Any]:
        """Return the result of `worker.measure`. Raises ProgramError if it fails."""
        assert self.process.stdin is not None
        asked = json.dumps({"requests": requests, "concurrency": concurrency})
        print(asked, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"failed": self._last_line()}
        if "failed" in found:
            raise ProgramError(found["failed"])
        return found

    def _last_line(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        return (lines or ["it ended"])[-1][:300]

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()
        self.errors.close()
