"""Runs that are started from a hostfile on nodes of namespaces, as the example scripts do."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from launched_runs import BIN, FLAGS, ROOT, environment
from nodes.namespaces import Node, send

SCRIPT = """
source {common}
start pretrain_gpt.py "$@"
"""


def hostfile(path: Path, names: dict[str, int]) -> Path:
    path.write_text("".join(f"{name} slots={slots}\n" for name, slots in names.items()))
    return path


def variables(**settings: object) -> dict[str, str]:
    """Of the environment of a launcher, with settings of ``common.sh``."""
    own = environment() | {"OMP_NUM_THREADS": "1", "RESTART_PAUSE": "1"}
    own.pop("GLOO_SOCKET_IFNAME", None)
    return own | {name: str(value) for name, value in settings.items()}


class HostfileRun:
    """A run that a script over ``common.sh`` starts on the first of some nodes."""

    def __init__(self, head: Node, folder: Path, *flags: object, **settings: object) -> None:
        self.save, self.log = folder / "save", folder / "log"
        script = folder / "train.sh"
        script.write_text(SCRIPT.format(common=ROOT / "examples_deepspeed" / "common.sh"))
        words = ["bash", script, *FLAGS, *flags, "--save", self.save, "--load", self.save]
        with self.log.open("a") as log:
            self.process = head.start(
                *words, cwd=ROOT, env=variables(**settings), stdout=log, stderr=subprocess.STDOUT
            )

    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, seconds: float = 240) -> float:
        """Seconds until the log has it."""
        start = time.monotonic()
        while not re.search(pattern, self.said()):
            assert self.process.poll() is None, self.said()[-5000:]
            assert time.monotonic() < start + seconds, self.said()[-5000:]
            time.sleep(0.1)
        return time.monotonic() - start

    def wait(self) -> int:
        return self.process.wait(timeout=300)

    def stop(self) -> int:
        """As a person or a scheduler does."""
        send(self.process, signal.SIGTERM)
        return self.wait()


@contextlib.contextmanager
def a_run(head: Node, folder: Path, *flags: object, **settings: object) -> Iterator[HostfileRun]:
    run = HostfileRun(head, folder, *flags, **settings)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()  # the nodes end what it has started
            run.process.wait()


def losses(save: Path) -> dict[int, float]:
    """Of every iteration; each is there once."""
    lines = (save / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    found = {row["iteration"]: row["loss"] for row in rows}
    assert len(found) == len(rows)
    return found


def undisturbed(folder: Path, *flags: object) -> dict[int, float]:
    """The losses of the same run in one process that nothing interrupts."""
    words = [BIN / "python", "pretrain_gpt.py", *FLAGS, *flags, "--save", folder]
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, env=variables(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return losses(folder)
