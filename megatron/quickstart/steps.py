"""A chain of commands that is run once, and again only from the first command that changed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.util.digests import sha256, sha256_of_file
from megatron.util.files import write_whole

FREE_PORT = "{free port}"
"""Word of a command that stands for a port that is free when the command starts."""


class StepFailed(RuntimeError):
    """A command failed, or did not leave what it should; the message says which."""


@dataclass(frozen=True)
class Step:
    """A command as a user would type it.

    Attributes:
        name: what it does, for people and for its stamp.
        command: its words; ``python`` and ``deepspeed`` are those of this environment.
        reads: files whose content matters, other than what earlier steps made.
        makes: files and folders that are there afterwards; a step that makes none always runs.
        goes_on: whether it continues what is there; otherwise that is removed first.
    """

    name: str
    command: tuple[str, ...]
    reads: tuple[Path, ...] = ()
    makes: tuple[Path, ...] = ()
    goes_on: bool = False


class Chain:
    """Runs steps in order, and leaves out those whose result is there already.

    A step's stamp hashes its command, what it reads, and the stamp of the step before; so whatever
    changes, the steps from there on run again and no earlier ones.

    Args:
        stamps: folder of the stamps.
        start: identifies what the first step begins with.
    """

    def __init__(self, stamps: Path, start: str) -> None:
        self._stamps, self._previous = stamps, start
        stamps.mkdir(parents=True, exist_ok=True)

    def run(self, step: Step) -> bool:
        """Runs ``step`` unless it is up to date; returns whether it ran.

        Raises:
            StepFailed: the command failed, or what it makes is not there.
        """
        self._previous = digest = self._digest(step)
        stamp = self._stamps / step.name
        done = step.makes and all(path.exists() for path in step.makes)
        if done and _content(stamp) == digest:
            say(f"{step.name}: up to date")
            return False
        stamp.unlink(missing_ok=True)
        if not step.goes_on:
            for path in step.makes:
                _remove(path)
        say(step.name)
        run_command(step)
        for path in step.makes:
            if not path.exists():
                raise StepFailed(f"{step.name}: the command left no {path}")
        write_whole(stamp, digest.encode())
        return True

    def _digest(self, step: Step) -> str:
        read = [sha256_of_file(path) for path in step.reads]
        return sha256(json.dumps([self._previous, step.command, read]))


def run_command(step: Step) -> None:
    """Shows a step's command and runs it, its output going to where ours goes.

    Raises:
        StepFailed: it could not start, or its exit status is not 0.
    """
    words = [str(free_port()) if word == FREE_PORT else word for word in step.command]
    print(f"$ {shown(words)}", flush=True)
    if words[0] == "python":
        words[0] = sys.executable
    folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        status = subprocess.run(words, env=environment, check=False).returncode
    except FileNotFoundError:
        raise StepFailed(f"{step.name}: there is no command {words[0]}; run make install") from None
    if status:
        raise StepFailed(f"{step.name}: the command above failed with exit status {status}")


def say(text: str) -> None:
    """Prints a line of the driver's own."""
    print(f"\nquickstart: {text}", flush=True)


def shown(words: Sequence[str], width: int = 96) -> str:
    """A command for people, ready to be pasted: long ones are broken in front of their flags."""
    lines = [shlex.quote(words[0])]
    for flag, *values in _flags(words[1:]):
        part = shlex.join([flag, *values])
        if len(lines[-1]) + 1 + len(part.partition("\n")[0]) > width:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)


def _flags(words: Sequence[str]) -> list[list[str]]:
    """Each flag with its values."""
    groups: list[list[str]] = []
    for word in words:
        if groups and not word.startswith("-") and groups[-1][0].startswith("-"):
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _content(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
