"""Applies a function to lines of files: in several processes, with progress, counts and resume.

A journal beside the first output records how far the input was read and how large each output was
then. Checkpoints follow fixed amounts of input, never the clock, so that a run that was killed and
continued writes the same bytes as one that was not.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.apps.corpus.collection.json_files import (
    BatchResult,
    BatchStep,
    OutputFile,
    RecordStep,
    map_records,
    partial_path,
    publish,
    read_lines,
    write_packed,
)
from megatron.apps.corpus.preprocessing.inputs import (
    JSON_ENDINGS,
    LineBatch,
    expand_inputs,
    total_bytes,
)
from megatron.apps.corpus.preprocessing.reporting import Progress
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.util.errors import one_line
from megatron.util.processes import map_in_order

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SHOWN_LINES = 5


@dataclass(frozen=True)
class LineJobConfig:
    """Running: flags of all collection tools."""

    on_bad_line: str = option("error", choices=("error", "skip"))
    """On a malformed line: stop, or count, list and leave it out."""
    workers: int = option(1, aliases=("--num-threads",))
    """Processes that work on the documents; the output is the same for any number."""
    log_interval: int = option(100)
    """Documents between two progress lines, which come once a second at most."""
    checkpoint_interval: float = option(16.0)
    """Megabytes of input after which a killed run can continue."""

    def check(self) -> None:
        for name in ("workers", "log_interval", "checkpoint_interval"):
            if getattr(self, name) <= 0:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {getattr(self, name)} must be greater than 0")


@dataclass(frozen=True)
class LineJob:
    """Which files become which, by what function."""

    tool: str
    inputs: Sequence[Path]
    outputs: Sequence[Path]
    """All outputs; with `per_input`, those of the first input, then of the second ..."""
    prepare: Callable[[], RecordStep | BatchStep]
    """Pickled, and called in each worker. The same batch gives the same result in all of them."""
    keys: Sequence[str] | None = ()
    """Keys that must have a string in every record; None: the step takes whole batches."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What decides the output besides the inputs. JSON."""
    per_input: bool = False
    reader: Callable[[Sequence[Path]], Iterable[LineBatch]] = read_lines
    journal: Path | None = None
    """Path of the journal; None: beside the first output."""
    resumable: bool = True
    """False where a result depends on the documents before it: one process does all, and a run
    that was stopped starts again."""

    @property
    def outputs_per_batch(self) -> int:
        return len(self.outputs) // (max(len(self.inputs), 1) if self.per_input else 1)

    def description(self) -> dict[str, Any]:
        """What a journal must agree with to be continued."""
        described = {
            "tool": self.tool,
            "inputs": [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in self.inputs],
            "outputs": list(map(str, self.outputs)),
            "settings": dict(self.settings),
        }
        return json.loads(json.dumps(described))

    def batch_step(self) -> BatchStep:
        step: Any = self.prepare()
        if self.keys is None:
            return step
        keys, outputs = self.keys, self.outputs_per_batch
        return lambda batch: map_records(batch, keys, step, outputs)


@dataclass
class JobReport:
    documents: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    """Malformed lines left out, by reason."""
    shown: list[str] = field(default_factory=list)
    """The first of these lines."""

    def __str__(self) -> str:
        lines = [f"{self.documents:,} documents read"]
        lines += [f"{count:,} {what}" for what, count in sorted(self.counts.items())]
        if self.bad:
            reasons = ", ".join(f"{count:,} x {reason}" for reason, count in self.bad.items())
            lines.append(f"{self.bad.total():,} malformed lines left out: {reasons}")
            lines += [f"  {shown}" for shown in self.shown]
        return "\n".join(lines)


@dataclass
class _Journal(JobReport):
    description: dict[str, Any] = field(default_factory=dict)
    file: int = 0
    """Index of the current input."""
    line: int = 1
    """Its first line that is not done."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of the outputs."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.counts, self.bad = Counter(self.counts), Counter(self.bad)

    def add(self, batch: LineBatch, result: BatchResult, on_bad_line: str) -> None:
        """Counts a batch; ValueError for a malformed line, unless these are to be skipped."""
        for line in result.bad_lines:
            located = f"{batch.path}, line {line.number}: {line.reason} ({line.detail})"
            if on_bad_line == "error":
                raise ValueError(f"{located}; --on-bad-line skip leaves such lines out")
            self.bad[line.reason] += 1
            self.shown = [*self.shown, located][:_SHOWN_LINES]
        self.counts.update(result.counts)
        self.documents += result.documents
        self.line = batch.first_line + len(batch.lines)


def run(job: LineJob, config: LineJobConfig) -> JobReport:
    """Runs a job, or what is left of it; the outputs appear when all is done. Raises ValueError for
    a malformed line, unless they are skipped, or a damaged input; OSError if a file cannot be read
    or written."""
    config.check()
    _check_paths(job)
    if not job.resumable:
        config = replace(config, workers=1, checkpoint_interval=float("inf"))
    path = job.journal or job.outputs[0].with_name(job.outputs[0].name + ".progress")
    journal = _read_journal(path, job)
    if not journal.finished:
        _work(job, config, journal, path)
    for output in job.outputs:
        publish(output)
    path.unlink(missing_ok=True)
    return journal


def _check_paths(job: LineJob) -> None:
    inputs, seen = {path.resolve() for path in job.inputs}, set()
    for output in job.outputs:
        if output.resolve() in inputs:
            raise ConfigError(f"{output} is input and output; name another output")
        if output.resolve() in seen:
            raise ConfigError(f"two outputs have the name {output}")
        if output.is_dir():
            raise ConfigError(f"the output {output} is a folder; name a file")
        seen.add(output.resolve())


def _read_journal(path: Path, job: LineJob) -> _Journal:
    fresh = _Journal(description=job.description(), sizes=[0] * len(job.outputs))
    if not path.exists():
        return fresh
    try:
        found = _Journal(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        found = _Journal()
    if found.description != fresh.description or not (found.finished or _has_outputs(job, found)):
        print(f"{path} is of another run or input; starting again", file=sys.stderr)
        return fresh
    if not found.finished:
        where = f"line {found.line:,} of {job.inputs[found.file]}"
        print(f"continuing a run that was stopped, at {where}", file=sys.stderr)
    return found


def _has_outputs(job: LineJob, journal: _Journal) -> bool:
    """Whether the partial outputs are as long as the journal says."""
    partials = map(partial_path, job.outputs)
    return all(
        size == 0 or (partial.exists() and partial.stat().st_size >= size)
        for partial, size in zip(partials, journal.sizes, strict=True)
    )


def _work(job: LineJob, config: LineJobConfig, journal: _Journal, path: Path) -> None:
    outputs = _OutputFiles(job, journal)
    progress = Progress(total_bytes(job.inputs), config.log_interval)
    done = total_bytes(job.inputs[: journal.file])
    since_checkpoint = 0

    def checkpoint() -> None:
        outputs.checkpoint()
        write_packed(path, json.dumps(vars(journal)).encode())

    try:
        remaining = _remaining(job.reader(job.inputs[journal.file :]), job, journal)
        workers = config.workers if config.workers > 1 else 0
        for batch, result in map_in_order(remaining, job.batch_step, workers):
            while batch.path != job.inputs[journal.file]:
                journal.file, journal.line = journal.file + 1, 1
            outputs.write(journal.file, result.outputs)
            journal.add(batch, result, config.on_bad_line)
            size = sum(map(len, batch.lines))
            progress.update(result.documents, size, done + batch.position)
            since_checkpoint += size
            if since_checkpoint >= config.checkpoint_interval * 1e6:
                checkpoint()
                since_checkpoint = 0
        for file in range(len(job.inputs)):
            outputs.open_for(file)  # creates outputs without lines, too
        journal.finished = True
        checkpoint()
    finally:
        progress.close()
        outputs.close()


def _remaining(
    batches: Iterable[LineBatch], job: LineJob, journal: _Journal
) -> Iterator[LineBatch]:
    """What is not done, with batches that begin and end as in a run from the start."""
    first, line = job.inputs[journal.file] if job.inputs else None, journal.line
    for batch in batches:
        done = line - batch.first_line if batch.path == first else 0
        if done < len(batch.lines):
            yield replace(batch, first_line=line, lines=batch.lines[done:]) if done > 0 else batch


class _OutputFiles:
    """The outputs of a job; where each input has its own, those of one input are open."""

    def __init__(self, job: LineJob, journal: _Journal) -> None:
        self._job, self._journal = job, journal
        self._open: dict[int, OutputFile] = {}
        self.open_for(journal.file)

    def open_for(self, file: int) -> None:
        count = self._job.outputs_per_batch
        first = file * count if self._job.per_input else 0
        if self._open.keys() != set(range(first, first + count)):
            self.checkpoint()
            self.close()
            for number in range(first, first + count):
                size = self._journal.sizes[number]
                self._open[number] = OutputFile(self._job.outputs[number], size)

    def write(self, file: int, data: Sequence[bytes]) -> None:
        self.open_for(file)
        for output, lines in zip(self._open.values(), data, strict=False):
            output.write(lines)

    def checkpoint(self) -> None:
        for number, output in self._open.items():
            self._journal.sizes[number] = output.checkpoint()

    def close(self) -> None:
        for output in self._open.values():
            output.close()
        self._open = {}


def with_flags(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Turns words before the first flag into values of `flags`, in this order. Megatron's scripts
    read their files without flags: `cleanup_dataset.py IN OUT` is `cleanup_dataset.py --input IN
    --output OUT`."""
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    if count > len(flags):
        raise ConfigError(f"'{argv[len(flags)]}' is one word too many; expected {' '.join(flags)}")
    named = zip(flags, argv[:count], strict=False)
    return [word for pair in named for word in pair] + list(argv[count:])


def run_tool(
    name: str,
    description: str | None,
    action: Callable[..., object],
    argv: Sequence[str] | None,
    positional: Sequence[str] = (),
) -> None:
    """Parses the command line, runs a tool, and prints its report. The config classes that annotate
    the arguments of `action` are the tool's flags; `positional` are flags of the first words, if
    these are not flags."""
    try:
        words = with_flags(sys.argv[1:] if argv is None else argv, positional)
        hints = typing.get_type_hints(action)
        classes = [hints[parameter] for parameter in inspect.signature(action).parameters]
        print(action(*parse_configs(classes, words, description=description, prog=name)))
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: error: {one_line(error)}")


def required(config: object, *fields: str) -> list[Any]:
    """The values of some fields; raises ConfigError on the first flag without a value."""
    values = [getattr(config, name) for name in fields]
    for name, value in zip(fields, values, strict=True):
        if value in (None, (), ""):
            raise ConfigError(f"--{name.replace('_', '-')} is missing")
    return values


def run_on_json(
    config: DataclassInstance,
    running: LineJobConfig,
    tool: str,
    prepare: Callable[..., RecordStep],
    inputs: Iterable[str],
    outputs: Iterable[str | Path | None],
    *,
    keys: Sequence[str] = (),
    uses: Mapping[str, Any] | None = None,
    **options: Any,
) -> JobReport:
    """Runs the step that `prepare(config, **uses)` makes over JSON-lines files. An output of None
    is not wanted; `uses` is what decides the output besides the config, as JSON; `options` are
    further fields of `LineJob`."""
    uses = uses or {}
    job = LineJob(
        tool,
        json_inputs(inputs),
        [Path(path) for path in outputs if path],
        functools.partial(prepare, config, **uses),
        keys,
        json.loads(json.dumps({**asdict(config), **uses}, default=asdict)),
        **options,
    )
    return run(job, running)


def json_inputs(patterns: Iterable[str]) -> list[Path]:
    """JSON-lines files of paths, globs and folders; FileNotFoundError for one without a file."""
    return expand_inputs(list(patterns), JSON_ENDINGS)
