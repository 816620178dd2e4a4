"""Files through a step to files: with progress, counts, and continuation after a kill.

What is needed to go on stands in a journal beside the first output: how far the input was read and
how large each output was then. A checkpoint comes after a fixed amount of input, never by the
clock, so that a run that was killed and continued writes the same bytes as one that was not.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.corpus.collection.outputs import OutputFile, partial_path, publish, write_packed
from megatron.corpus.collection.workers import Step, map_batches
from megatron.corpus.preprocessing.inputs import LineBatch, read_batches, total_bytes
from megatron.corpus.preprocessing.progress import Progress

_MAX_LINES = 1000
_SHOWN = 5

Reader = Callable[[Sequence[Path]], Iterable[LineBatch]]


def read_lines(paths: Sequence[Path]) -> Iterator[LineBatch]:
    """All lines, in batches that are small enough to spread over processes."""
    return read_batches(paths, _MAX_LINES)


@dataclass(frozen=True)
class RunConfig:
    """Running: what all collection tools take."""

    on_bad_line: str = option("error", choices=("error", "skip"))
    """What a malformed line does: stop, or be counted, listed and left out."""
    workers: int = option(1, aliases=("--num-threads",))
    """Processes that work on the documents; the output is the same for any number."""
    log_interval: int = option(100)
    """Documents between two progress lines, which come once a second at most."""
    checkpoint_interval: float = option(16.0)
    """Megabytes of input after which a killed run can continue."""

    def check(self) -> None:
        """Raises ConfigError on a value out of range."""
        for flag, value in (
            ("--workers", self.workers),
            ("--log-interval", self.log_interval),
            ("--checkpoint-interval", self.checkpoint_interval),
        ):
            if value <= 0:
                raise ConfigError(f"{flag} {value} must be greater than 0")


@dataclass(frozen=True)
class Job:
    """Which files become which, by what."""

    tool: str
    inputs: Sequence[Path]
    outputs: Sequence[Path]
    """All outputs; with `outputs_per_input`, those of the first input, then of the second ..."""
    step: Step
    outputs_per_input: int | None = None
    reader: Reader = read_lines
    journal: Path | None = None
    """Where it is written down how far the job came; None: beside the first output."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All that decides what is written, besides the inputs. JSON."""
    resumable: bool = True
    """Not where a document's fate hangs on those before it: one process then does all, and a run
    that was stopped starts anew."""

    def description(self) -> dict[str, Any]:
        """What a journal must agree with to be continued."""
        files = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in self.inputs]
        described = {
            "tool": self.tool,
            "inputs": files,
            "outputs": list(map(str, self.outputs)),
            "settings": dict(self.settings),
        }
        return json.loads(json.dumps(described))


@dataclass
class _Journal:
    """How far a job came."""

    description: dict[str, Any]
    file: int = 0
    """Number of the input that is read."""
    line: int = 1
    """The first line of it that is still to do."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of the outputs."""
    documents: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True)
class Report:
    """What came of a job."""

    documents: int
    counts: Counter[str]
    bad: Counter[str]
    """Malformed lines left out, by reason."""
    shown: Sequence[str]
    """The first of them."""

    def __str__(self) -> str:
        lines = [f"{self.documents:,} documents read"]
        lines += [f"{count:,} {what}" for what, count in sorted(self.counts.items())]
        if self.bad:
            reasons = ", ".join(f"{count:,} x {reason}" for reason, count in self.bad.items())
            lines.append(f"{self.bad.total():,} malformed lines left out: {reasons}")
            lines += [f"  {shown}" for shown in self.shown]
        return "\n".join(lines)


def run(job: Job, config: RunConfig) -> Report:
    """Runs a job, or what is left of it; the outputs appear when all is done.

    Raises:
        ValueError: a malformed line, unless they are skipped; a damaged input.
        OSError: a file cannot be read or written.
    """
    config.check()
    _check_paths(job)
    if not job.resumable:
        config = replace(config, workers=1, checkpoint_interval=float("inf"))
    path = job.journal or journal_path(job.outputs[0])
    journal = _journal(path, job)
    if not journal.finished:
        _work(job, config, journal, path)
    for output in job.outputs:
        publish(output)
    path.unlink(missing_ok=True)
    return Report(journal.documents, Counter(journal.counts), Counter(journal.bad), journal.shown)


def journal_path(output: Path) -> Path:
    """Where it is written down how far a job came."""
    return output.with_name(output.name + ".progress")


def _check_paths(job: Job) -> None:
    outputs = [output.resolve() for output in job.outputs]
    for number, output in enumerate(outputs):
        if output in {path.resolve() for path in job.inputs}:
            raise ConfigError(f"{job.outputs[number]} is input and output; name another output")
        if output in outputs[:number]:
            raise ConfigError(f"two outputs have the name {job.outputs[number]}")
        if output.is_dir():
            raise ConfigError(f"the output {job.outputs[number]} is a folder; name a file")


def _journal(path: Path, job: Job) -> _Journal:
    description = job.description()
    fresh = _Journal(description, sizes=[0] * len(job.outputs))
    if not path.exists():
        return fresh
    try:
        found = _Journal(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        found = replace(fresh, description={})
    if found.description != description or not (found.finished or _are_there(job, found)):
        print(f"{path} is of another run or input; starting anew", file=sys.stderr)
        return fresh
    if not found.finished:
        where = f"line {found.line:,} of {job.inputs[found.file]}"
        print(f"continuing a run that was stopped, at {where}", file=sys.stderr)
    return found


def _are_there(job: Job, journal: _Journal) -> bool:
    """Whether the partial outputs hold what the journal says."""
    partials = [partial_path(output) for output in job.outputs]
    return all(
        size == 0 or (partial.exists() and partial.stat().st_size >= size)
        for partial, size in zip(partials, journal.sizes, strict=True)
    )


def _work(job: Job, config: RunConfig, journal: _Journal, path: Path) -> None:
    outputs = _Outputs(job, journal)
    progress = Progress(total_bytes(job.inputs), config.log_interval)
    done = total_bytes(job.inputs[: journal.file])
    since_checkpoint = 0
    try:
        outputs.open_for(journal.file)
        remaining = _remaining(job.reader(job.inputs[journal.file :]), job, journal)
        for batch, mapped in map_batches(remaining, job.step, config.workers):
            while batch.path != job.inputs[journal.file]:
                journal.file, journal.line = journal.file + 1, 1
                outputs.open_for(journal.file)
            outputs.write(mapped.outputs)
            for line in mapped.bad_lines:
                located = f"{batch.path}, line {line.number}: {line.reason} ({line.detail})"
                if config.on_bad_line == "error":
                    raise ValueError(f"{located}; --on-bad-line skip leaves such lines out")
                journal.bad[line.reason] = journal.bad.get(line.reason, 0) + 1
                journal.shown = [*journal.shown, located][:_SHOWN]
            for what, count in mapped.counts.items():
                journal.counts[what] = journal.counts.get(what, 0) + count
            journal.documents += mapped.documents
            journal.line = batch.first_line + len(batch.lines)
            size = sum(map(len, batch.lines))
            progress.update(mapped.documents, size, done + batch.position)
            since_checkpoint += size
            if since_checkpoint >= config.checkpoint_interval * 1e6:
                outputs.checkpoint()
                write_packed(path, json.dumps(asdict(journal)).encode())
                since_checkpoint = 0
        outputs.open_all()
        outputs.checkpoint()
        journal.finished = True
        write_packed(path, json.dumps(asdict(journal)).encode())
    finally:
        progress.close()
        outputs.close()


def _remaining(batches: Iterable[LineBatch], job: Job, journal: _Journal) -> Iterator[LineBatch]:
    """What is not done, with batches that begin and end as in a run from the start."""
    first, line = job.inputs[journal.file] if job.inputs else None, journal.line
    for batch in batches:
        done = line - batch.first_line if batch.path == first else 0
        if done < len(batch.lines):
            yield replace(batch, first_line=line, lines=batch.lines[done:]) if done > 0 else batch


class _Outputs:
    """The outputs of a job, of which those of one input are open where each has its own."""

    def __init__(self, job: Job, journal: _Journal) -> None:
        self._job, self._journal = job, journal
        self._open: list[OutputFile] = []
        self._first = 0

    def open_for(self, file: int) -> None:
        """Opens the outputs of an input, and closes those of the one before."""
        count = self._job.outputs_per_input
        if self._open and (count is None or self._first == file * count):
            return
        self.checkpoint()
        self.close()
        self._first = 0 if count is None else file * count
        last = len(self._job.outputs) if count is None else self._first + count
        for number in range(self._first, last):
            size = self._journal.sizes[number]
            self._open.append(OutputFile(self._job.outputs[number], size))

    def open_all(self) -> None:
        """Makes files of outputs that nothing was written to."""
        if self._job.outputs_per_input is not None:
            for file in range(len(self._job.inputs)):
                self.open_for(file)

    def write(self, data: Sequence[bytes]) -> None:
        assert len(data) == len(self._open)
        for output, lines in zip(self._open, data, strict=True):
            output.write(lines)

    def checkpoint(self) -> None:
        for number, output in enumerate(self._open, self._first):
            self._journal.sizes[number] = output.checkpoint()

    def close(self) -> None:
        for output in self._open:
            output.close()
        self._open = []
