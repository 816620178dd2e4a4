"""Session with a probe on a node. The probe is started in the way launchers start processes: with
ssh, with srun, or locally."""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.apps.doctor import probe
from megatron.util import digests

_BEGIN = "-uc", "exec(input())"
_BOOT = """
import sys, types
for name in ("megatron", "megatron.util", "megatron.util.digests"):
    sys.modules[name] = types.ModuleType(name)
exec({digests!r}, sys.modules["megatron.util.digests"].__dict__)
exec({probe!r})
serve()
"""


class ProbeError(RuntimeError):
    """Raised if a node did not answer in time, or answered with an error."""


class Session:
    """Session with one node's probe. ``name`` is the name by which other nodes address the node,
    and ``command`` starts Python there. Requests are answered in order."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._asked = 0
        self._read = b""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0
        )

    def ready(self, seconds: float) -> None:
        """Send the probe, and wait until it runs. Raises ProbeError if it does not."""
        sources = {"digests": digests.__file__, "probe": probe.__file__}
        boot = _BOOT.format(**{name: Path(file).read_text() for name, file in sources.items()})
        code = base64.b64encode(boot.encode()).decode()
        self._write(f"exec(__import__('base64').b64decode('{code}'))")
        deadline = time.monotonic() + seconds
        while self._line(deadline) != b"ready":  # skip the greetings of login shells
            pass

    def ask(self, request: str, within: float, **values: Any) -> Any:
        """Call a function of the probe. Raises ProbeError if it fails or takes too long."""
        self._asked += 1
        self._write(json.dumps([self._asked, request, values]))
        deadline, answer = time.monotonic() + within, {"number": 0}
        while answer["number"] < self._asked:  # skip late answers to earlier requests
            answer = json.loads(self._line(deadline))
        if "error" in answer:
            raise ProbeError(answer["error"])
        return answer["answer"]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise ProbeError(self._last_words()) from None

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise ProbeError("no answer in time")
            got = os.read(pipe, 2**16)
            if not got:
                raise ProbeError(self._last_words())
            self._read += got
        line, _, self._read = self._read.partition(b"\n")
        return line.strip()

    def _last_words(self) -> str:
        self._process.kill()
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the connection ended"


def by_ssh(name: str, folder: str, python: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a node's probe over ssh."""
    words = shlex.join(["cd", folder]) + " && exec " + shlex.join([python, *_BEGIN])
    ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *options]
    return [*ssh, name, f"sh -c {shlex.quote(words)}"]


def by_srun(name: str, folder: str, python: str) -> list[str]:
    """Return the command that starts a node's probe within a Slurm allocation."""
    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--unbuffered", f"--nodelist={name}"]
    return [*step, f"--chdir={folder}", python, *_BEGIN]


def here(python: str) -> list[str]:
    return [python, *_BEGIN]


def on_all(
    sessions: Sequence[Session], job: Callable[[Session], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run a job for all nodes concurrently. Return results and errors, each by node name."""
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def one(session: Session) -> Any:
        try:
            return job(session)
        except ProbeError as error:
            return error

    with ThreadPoolExecutor(max(1, len(sessions))) as pool:
        for session, answer in zip(sessions, pool.map(one, sessions), strict=True):
            if isinstance(answer, ProbeError):
                errors[session.name] = str(answer)
            else:
                answers[session.name] = answer
    return answers, errors
