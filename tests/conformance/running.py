"""Runs documented commands as a user types them, each in a folder that holds the checkout."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
from doc_commands import Programs
from documented import LINES, ROOT, Case, case_of, shrunk, small_flags
from filelock import FileLock

BIN = Path(sys.executable).parent
"""The commands of the environment."""
PATIENCE = 300.0
"""Seconds that a command may take."""
STAND_INS = "stand-ins"
"""Folder of the programs that stand for others."""
APART = {".git", ".venv", ".github", ".ci", "docs", "tests", "site"}
"""What the folder of a command does not hold of the checkout."""


@dataclass(frozen=True)
class Done:
    """A command that has ended: what was run, where, how it ended, what it printed."""

    command: str
    folder: Path
    status: int
    output: str


class Failed(AssertionError):
    """A command did not do what its case says; the message has its output."""


class Runner:
    """Runs cases, each once; those that come after another continue in a copy of its folder.

    Args:
        folder: where the folders of the commands are made.
        data: the folder of public data.
        programs: runs ``python PROGRAM.py`` in a process that has imported everything; by default
            each command starts its own processes.
    """

    def __init__(self, folder: Path, data: Path, programs: Programs | None = None) -> None:
        self.folder, self.data, self.programs = folder, data, programs
        self._done: dict[str, Done | Failed] = {}

    def run(self, case: Case) -> Done:
        """Runs a case and what it comes after.

        Raises:
            Failed: a case that it comes after failed.
        """
        if case.id not in self._done:
            try:
                folder = self._fresh(case, re.sub(r"\W+", "-", case.id))
                self._done[case.id] = self._started(case, folder, case.small(), case.sizes)
            except Failed as error:
                self._done[case.id] = error
        done = self._done[case.id]
        if isinstance(done, Failed):
            raise done
        return done

    def run_today(self, case: Case) -> Done:
        """Runs the command that a case should equal, in a folder like that of the case."""
        assert case.today is not None
        folder = self._fresh(case, re.sub(r"\W+", "-", case.id) + "-today")
        text, _ = shrunk(case.today.run, dict(case.today.sizes), case.id)
        sizes = {k: v for k, v in case.sizes.items() if f"{k} " in case.today.run}
        if not case.today.sizes:
            text, _ = shrunk(case.today.run, sizes, case.id)
        return self._started(case, folder, text, {})

    def printed(self, case: Case, folder: Path) -> str:
        """The command that a script prints in a dry run."""
        done = self._shell(case.run, folder, dict(case.environment) | {"DRY_RUN": "1"})
        if done.status:
            raise Failed(f"DRY_RUN=1 {case.run}\nstatus {done.status}\n{done.output}")
        return done.output

    def dry_folder(self, case: Case) -> Path:
        """A folder with the checkout and no data."""
        folder = self.folder / (re.sub(r"\W+", "-", case.id) + "-dry")
        return checkout(folder) if not folder.exists() else folder

    def _started(self, case: Case, folder: Path, text: str, sizes: dict[str, str]) -> Done:
        if case.stand_in:
            program = folder / STAND_INS / case.stand_in
            program.parent.mkdir()
            program.write_text(f'#!/bin/sh\necho {case.stand_in} "$@"\n')
            program.chmod(0o755)
        if case.prepare:
            done = self._shell(f"set -e; {case.prepare}", folder, case.environment)
            if done.status:
                raise Failed(f"{case.prepare}\nstatus {done.status}\n{done.output}")
        if case.is_script and sized_script(text):
            printed = self.printed(case, folder)
            text = f"{text} {small_flags(printed, sizes, case.id)}"
        # Tests run next to each other; a launcher's documented port may be another's.
        text = re.sub(r"(?<=--master_port )\d+", free_port(), text)
        words = plain_program(text)
        if self.programs is not None and words is not None:
            status, output = self.programs.run(words[0], words[1:], folder, **case.environment)
            return Done(text, folder, status, output)
        if case.serves:
            with self._serving(case, folder, text) as served:
                pass
            return served.done()
        if case.alongside:
            return self._alongside(case, folder, text)
        return self._shell(text, folder, case.environment, case.typed)

    def _alongside(self, case: Case, folder: Path, text: str) -> Done:
        """Runs a command while the server runs that it asks."""
        server = case_of(f"{case.document}/{case.alongside}")
        theirs = self._fresh(server, re.sub(r"\W+", "-", f"{server.id}-for-{case.name}"))
        with self._serving(server, theirs, server.small()):
            return self._shell(text, folder, case.environment, case.typed)

    @contextlib.contextmanager
    def _serving(self, case: Case, folder: Path, text: str) -> Iterator[Served]:
        """A server, from when it serves to when SIGTERM has ended it. It has the documented port,
        which only one can have."""
        with FileLock(Path(tempfile.gettempdir()) / f"conformance-server-{os.getuid()}.lock"):
            served = Served(text, folder, folder / "server.log")
            with (
                served.log.open("w") as log,
                self._process(text, folder, case.environment, log) as p,
            ):
                served.wait(p, str(case.serves))
                yield served
                for each in leaves(psutil.Process(p.pid)):  # not a launcher
                    each.terminate()
                served.status = p.wait(PATIENCE)

    def _fresh(self, case: Case, name: str) -> Path:
        folder = self.folder / name
        if case.after is None:
            checkout(folder)
        else:
            after = case.after if "/" in case.after else f"{case.document}/{case.after}"
            before = case_of(after)
            check(before, self.run(before))
            shutil.copytree(self.run(before).folder, folder, symlinks=True)
        place(case.files, folder, self.data)
        return folder

    def _shell(self, text: str, folder: Path, settings: Mapping[str, str], typed: str = "") -> Done:
        # DeepSpeed's launcher has one port where a command names none.
        only_one = FileLock(Path(tempfile.gettempdir()) / f"conformance-{os.getuid()}.lock")
        with (
            only_one if "deepspeed" in text else contextlib.nullcontext(),
            self._process(text, folder, settings, subprocess.PIPE) as process,
        ):
            try:
                output, _ = process.communicate(typed, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                raise Failed(f"not over after {PATIENCE:g} seconds: {text}") from None
        return Done(text, folder, process.returncode, output)

    @contextlib.contextmanager
    def _process(
        self, text: str, folder: Path, settings: Mapping[str, str], output: int | IO[str]
    ) -> Iterator[subprocess.Popen[str]]:
        """A command as a user starts it; killed with all that it started, if it still runs at the
        end of the block."""
        launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
        kept = {k: v for k, v in os.environ.items() if k not in launched}
        # What users set on a machine whose cores other processes share.
        kept |= {"PATH": f"{folder / STAND_INS}:{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        kept["MASTER_PORT"] = free_port()
        process = subprocess.Popen(
            ["bash", "-c", text], cwd=folder, env=kept | dict(settings), text=True,
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass
class Served:
    """A server that runs, or did."""

    command: str
    folder: Path
    log: Path
    status: int | None = None

    def wait(self, process: subprocess.Popen[str], pattern: str) -> None:
        """Waits until it prints a pattern. Raises Failed if it ends before, or takes too long."""
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self.log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"does not print {pattern}\n$ {self.command}\n{self.log.read_text()}")
            time.sleep(0.1)

    def done(self) -> Done:
        """What it did; it has ended."""
        assert self.status is not None
        return Done(self.command, self.folder, self.status, self.log.read_text())


def leaves(process: psutil.Process) -> list[psutil.Process]:
    """The processes that a process has started, and that have started none themselves."""
    below = [leaf for child in process.children() for leaf in leaves(child)]
    return below or [process]


def free_port() -> str:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def training_script(text: str) -> bool:
    """Whether a command is one of the scripts that train."""
    scripts = r"/(distribute_)?(pretrain|run_universal|run_bf16|run_fp16)|/finetune_llama\.sh$"
    return re.search(scripts, text) is not None


def sized_script(text: str) -> bool:
    """Whether a command is one of the scripts that train or run a task, whose sizes are flags."""
    scripts = (
        r"/(evaluate_|finetune_|lambada_|run_text_generation_|selfgenerate-|generate-1"
        r"|preprocess_data)"
    )
    return training_script(text) or re.search(scripts, text) is not None


def plain_program(text: str) -> list[str] | None:
    """Program and words of a command that is ``python PROGRAM.py`` and nothing more."""
    found = re.fullmatch(r"python3? ([\w/]+\.py( [^|&;<>`]*)?)", text)
    return shlex.split(found[1]) if found else None


def checkout(folder: Path) -> Path:
    """Makes a folder that holds the checkout, as links."""
    folder.mkdir(parents=True)
    for entry in ROOT.iterdir():
        if entry.name not in APART:
            (folder / entry.name).symlink_to(entry)
    return folder


def place(files: dict[str, str], folder: Path, data: Path) -> None:
    """Puts public data into a folder under the names that a document uses."""
    for name, source in files.items():
        path, *words = source.split()
        path, _, lines = path.partition("[:")
        target = folder / name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not lines and not words:
            target.symlink_to(data / path)
            continue
        with (data / path).open() as file:
            text = [line for line, _ in zip(file, range(int(lines[:-1])), strict=False)]
        for renamed in words:
            old, new = renamed.split("=")
            text = [json.dumps({new: json.loads(line)[old]}) + "\n" for line in text]
        target.write_text("".join(text))


def check(case: Case, done: Done) -> None:
    """Compares what a command did with its case.

    Raises:
        Failed: status, output or files are others.
    """
    __tracebackhide__ = True
    shown = f"\n$ {done.command}\n(in {done.folder}; status {done.status})\n{done.output[-6000:]}"
    if done.status != case.status:
        raise Failed(f"{case.id}: ends with status {done.status}, expected {case.status}{shown}")
    if "Traceback (most recent call last)" in done.output:
        raise Failed(f"{case.id}: prints a traceback{shown}")
    for pattern in patterns(case.prints):
        if not re.search(pattern, done.output):
            raise Failed(f"{case.id}: does not print {pattern}{shown}")
    for name in case.leaves:
        if not any(done.folder.glob(name)):
            raise Failed(f"{case.id}: leaves no {name}{shown}")


def patterns(names: Iterable[str]) -> list[str]:
    """Patterns by their names in common.yaml, or as they are."""
    return [pattern for name in names for pattern in LINES.get(name, [name])]


TIMES = re.compile(r"second|memory|[mh]fu|flops|tokens_per")
"""Measurements that differ between equal runs."""


def numbers(done: Done) -> tuple[list[dict], dict[str, str]]:
    """What two equal runs share: the rows of metrics.jsonl without times, and the digests of the
    weight files of every checkpoint."""
    (metrics,) = done.folder.glob("**/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = (row for row in rows if row["kind"] != "save")
    kept = [{k: v for k, v in row.items() if not TIMES.search(k)} for row in trained]
    digests = {
        str(path.relative_to(metrics.parent)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(metrics.parent.glob("*/weights-*.safetensors"))
    }
    return kept, digests
