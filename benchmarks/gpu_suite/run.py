"""Runs measurements one after another; what is done stays done."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_suite.plan import CONFIGS, Job
from megatron.util.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
SHORTEST = 60.0
"""Seconds; with less than that left before the time limit no measurement begins."""


class Results:
    """A folder with a JSON file of every measurement that has been made.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "configs").mkdir(parents=True, exist_ok=True)
        for name, content in CONFIGS.items():
            text = json.dumps(content, indent=1) + "\n"
            write_whole(Path(self.config(name)), text.encode())

    def config(self, name: str) -> str:
        """Path of a DeepSpeed JSON of :data:`CONFIGS`."""
        return str(self.folder / "configs" / f"{name}.json")

    def path(self, job: Job) -> Path:
        """File of a measurement."""
        return self.folder / f"{job.name}.json"

    def of(self, job: Job) -> dict[str, Any] | None:
        """What was found, None if it has not been measured."""
        try:
            return json.loads(self.path(job).read_text())
        except FileNotFoundError:
            return None

    def put(self, job: Job, found: dict[str, Any]) -> None:
        """Keeps what was found."""
        write_whole(self.path(job), (json.dumps(found, indent=1) + "\n").encode())

    def forget_failures(self, jobs: Sequence[Job]) -> None:
        """Has those made again that failed."""
        for job in jobs:
            found = self.of(job)
            if found is not None and failure(job, found) is not None:
                self.path(job).unlink()


def failure(job: Job, found: dict[str, Any]) -> str | None:
    """Why a measurement has no numbers; None if it has."""
    if "failed" in found:
        return found["failed"]
    if job.part == "tests":
        return None
    result = found["contestants"][job.contestant]
    return result.get("failed") or result.get("missing")


def run_all(
    jobs: Sequence[Job],
    results: Results,
    limit: float | None,
    say: Callable[[str], None],
    after_each: Callable[[], None],
) -> bool:
    """Makes what has not been made.

    Args:
        jobs: all measurements.
        results: where they are kept.
        limit: seconds for all of them together; a measurement that it cuts off is made the next
            time.
        say: receives progress messages.
        after_each: called whenever there are new results.

    Returns:
        Whether all are made.
    """
    deadline = None if limit is None else time.monotonic() + limit
    for number, job in enumerate(jobs, 1):
        if results.of(job) is not None:
            continue
        left = job.timeout if deadline is None else deadline - time.monotonic()
        if left < min(SHORTEST, job.timeout):
            say(f"the time limit is reached; {job.name} and what follows is left to the next run")
            return False
        say(f"{number} of {len(jobs)}: {job.name}")
        found = run_one(job, results.path(job), min(left, job.timeout))
        if found is None and left < job.timeout:
            say(f"the time limit cut off {job.name}; the next run makes it")
            return False
        results.put(job, found or {"failed": f"not done within {job.timeout:.0f} s"})
        after_each()
    return True


def run_one(job: Job, path: Path, timeout: float) -> dict[str, Any] | None:
    """Runs a measurement's command in a process of its own.

    Args:
        job: what to run.
        path: its file; what the command prints is kept beside it.
        timeout: seconds after which it is ended, with all that it started.

    Returns:
        What it found, or ``failed`` and why; None if it was not done in time.
    """
    new = path.with_suffix(".new")
    command = list(job.command)
    if job.part != "tests":
        command += ["--json", str(new)]
    began = time.monotonic()
    log = path.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Contestants are in sessions of their own, and end with their parent.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "")
    if job.part == "tests":
        return {"status": status, "summary": last, "seconds": time.monotonic() - began}
    try:
        found = json.loads(new.read_text())
    except FileNotFoundError:
        return {"failed": f"exit status {status}: {last}"}
    new.unlink()
    return found
