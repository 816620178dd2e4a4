"""Application of a function to the lines of files, in several processes, with progress and resume.

A journal next to the first output records the position in the input and the sizes of the outputs.
Checkpoints are made after fixed amounts of input, not at fixed times, so that a killed and resumed
run writes the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
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
    write_packed,
)
from megatron.apps.corpus.preprocessing.inputs import (
    JSON_ENDINGS,
    LineBatch,
    expand_inputs,
    read_batches,
    total_bytes,
)
from megatron.apps.corpus.progress import Progress
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.util.errors import one_line
from megatron.util.workers import map_in_order

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SHOWN_LINES = 5


@dataclass(frozen=True)
class LineJobConfig:
    """Options for running the job, shared by all collection tools."""

    on_bad_line: str = option("error", choices=("error", "skip"))
    """Handling of malformed lines: error stops the run; skip leaves them out and reports them."""
    workers: int = option(1, aliases=("--num-threads",))
    """Number of processes that work on documents. The output does not depend on this number."""
    log_interval: int = option(100)
    """Number of documents between progress lines, which appear at most once per second."""
    checkpoint_interval: float = option(16.0)
    """Megabytes of input between checkpoints, from which a killed run can resume."""

    def check(self) -> None:
        for name in ("workers", "log_interval", "checkpoint_interval"):
            if getattr(self, name) <= 0:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {getattr(self, name)} must be greater than 0")


@dataclass(frozen=True)
class LineJob:
    """Files to read and write, and the function that processes each record or batch."""

    tool: str
    inputs: Sequence[Path]
    outputs: Sequence[Path]
    """Output files. With `per_input`, the outputs of the first input come first."""
    prepare: Callable[[], RecordStep | BatchStep]
    """Function that returns the step. It is pickled and called in each worker. All workers' steps
    must give the same result for a batch."""
    keys: Sequence[str] | None = ()
    """Keys that must have a string in every record. If None, the step processes whole batches."""
    # JSON values on which the output depends, apart from the inputs
    settings: Mapping[str, Any] = field(default_factory=dict)
    per_input: bool = False
    reader: Callable[[Sequence[Path]], Iterable[LineBatch]] = read_batches
    journal: Path | None = None  # None: next to the first output
    resumable: bool = True
    """False if a result depends on earlier documents. One process then does all the work, and an
    interrupted run starts over."""

    @property
    def outputs_per_batch(self) -> int:
        return len(self.outputs) // (max(len(self.inputs), 1) if self.per_input else 1)

    def description(self) -> dict[str, Any]:
        """Return the values that must equal those in a journal for the job to be resumed."""
        inputs = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in self.inputs]
        outputs, settings = list(map(str, self.outputs)), dict(self.settings)
        described = dict(tool=self.tool, inputs=inputs, outputs=outputs, settings=settings)
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
    # number of skipped malformed lines, by reason
    bad: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)  # the first few of these lines, for the report

    def __str__(self) -> str:
        lines = [f"{self.documents:,} documents read"]
        lines += [f"{count:,} {event}" for event, count in sorted(self.counts.items())]
        if self.bad:
            reasons = ", ".join(f"{count:,} x {reason}" for reason, count in self.bad.items())
            lines.append(f"{self.bad.total():,} malformed lines left out: {reasons}")
            lines += [f"  {line}" for line in self.shown]
        return "\n".join(lines)


@dataclass
class _Journal(JobReport):
    description: dict[str, Any] = field(default_factory=dict)
    file: int = 0  # index of the current input
    line: int = 1  # first line of this input that is not processed
    sizes: list[int] = field(default_factory=list)  # size of each output in bytes
    finished: bool = False

    def __post_init__(self) -> None:
        self.counts, self.bad = Counter(self.counts), Counter(self.bad)

    def add(self, batch: LineBatch, result: BatchResult, on_bad_line: str) -> None:
        """Count a processed batch. Raises ValueError for a malformed line unless these are
        skipped."""
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
    """Run a job, or resume an interrupted one. The outputs appear once the job is complete. Raises
    ValueError if an input is damaged, or if a line is malformed and such lines are not skipped.
    Raises OSError if a file cannot be read or written."""
    config.check()
    _check_paths(job)
    if not job.resumable:
        config = replace(config, workers=1, checkpoint_interval=float("inf"))
    path = job.journal or job.outputs[0].with_name(job.outputs[0].name + ".progress")
    journal = _read_journal(path, job)
    if not journal.finished:
        with closing(_Work(job, config, journal, path)) as work:
            work.run()
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
        journal = _Journal(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        journal = _Journal()
    is_same = journal.description == fresh.description
    if is_same and not journal.finished:
        sizes = [p.stat().st_size if p.exists() else 0 for p in map(partial_path, job.outputs)]
        is_same = all(map(operator.ge, sizes, journal.sizes))
    if not is_same:
        print(f"{path} is of another run or input; starting again", file=sys.stderr)
        return fresh
    if not journal.finished:
        where = f"line {journal.line:,} of {job.inputs[journal.file]}"
        print(f"continuing a run that was stopped, at {where}", file=sys.stderr)
    return journal


class _Work:
    """A running job. With `per_input`, only the outputs of the current input are open."""

    def __init__(
        self, job: LineJob, config: LineJobConfig, journal: _Journal, journal_path: Path
    ) -> None:
        self._job, self._config = job, config
        self._journal, self._journal_path = journal, journal_path
        self._open: dict[int, OutputFile] = {}
        self._progress = Progress(total_bytes(job.inputs), config.log_interval)

    def run(self) -> None:
        job, journal, since_checkpoint = self._job, self._journal, 0
        done = total_bytes(job.inputs[: journal.file])
        self._open_outputs(journal.file)
        workers = self._config.workers if self._config.workers > 1 else 0
        for batch, result in map_in_order(self._remaining(), job.batch_step, workers):
            while batch.path != job.inputs[journal.file]:
                journal.file, journal.line = journal.file + 1, 1
            self._open_outputs(journal.file)
            for output, lines in zip(self._open.values(), result.outputs, strict=False):
                output.write(lines)
            journal.add(batch, result, self._config.on_bad_line)
            size = sum(map(len, batch.lines))
            self._progress.update(result.documents, size, done + batch.position)
            since_checkpoint += size
            if since_checkpoint >= self._config.checkpoint_interval * 1e6:
                self._checkpoint()
                since_checkpoint = 0
        for file in range(len(job.inputs)):
            self._open_outputs(file)  # also creates empty outputs
        journal.finished = True
        self._checkpoint()

    def close(self) -> None:
        self._progress.close()
        for output in self._open.values():
            output.close()

    def _remaining(self) -> Iterator[LineBatch]:
        """Yield the batches that are not processed yet. Their boundaries are those of an
        uninterrupted run."""
        inputs, line = self._job.inputs[self._journal.file :], self._journal.line
        for batch in self._job.reader(inputs):
            if batch.path != inputs[0] or batch.first_line >= line:
                yield batch

    def _open_outputs(self, file: int) -> None:
        count = self._job.outputs_per_batch
        first = file * count if self._job.per_input else 0
        if self._open.keys() != set(range(first, first + count)):
            self._sync_outputs()
            for output in self._open.values():
                output.close()
            sizes, outputs = self._journal.sizes, self._job.outputs
            self._open = {n: OutputFile(outputs[n], sizes[n]) for n in range(first, first + count)}

    def _sync_outputs(self) -> None:
        for number, output in self._open.items():
            self._journal.sizes[number] = output.checkpoint()

    def _checkpoint(self) -> None:
        self._sync_outputs()
        write_packed(self._journal_path, json.dumps(vars(self._journal)).encode())


def with_flags(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Insert `flags`, in order, before the arguments that precede the first flag. Megatron's
    scripts accept files without flags, as in `cleanup_dataset.py IN OUT`."""
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
    """Parse the command line, run a tool, and print its report. The annotations of `action` are the
    config classes that define the tool's flags. `positional` lists the flags that leading arguments
    without a flag stand for."""
    try:
        words = with_flags(sys.argv[1:] if argv is None else argv, positional)
        hints = typing.get_type_hints(action)
        classes = [hints[parameter] for parameter in inspect.signature(action).parameters]
        print(action(*parse_configs(classes, words, description=description, prog=name)))
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: error: {one_line(error)}")


def required(config: object, *fields: str) -> list[Any]:
    """Return the values of the named fields. Raises ConfigError for the first unset field."""
    values = [getattr(config, name) for name in fields]
    for name, value in zip(fields, values, strict=True):
        if value in (None, (), ""):
            raise ConfigError(f"--{name.replace('_', '-')} is missing")
    return values


def run_step(
    config: DataclassInstance,
    running: LineJobConfig,
    tool: str,
    prepare: Callable[..., RecordStep | BatchStep],
    inputs: Sequence[Path],
    outputs: Iterable[str | Path | None],
    *,
    keys: Sequence[str] | None = (),
    uses: Mapping[str, Any] | None = None,
    **options: Any,
) -> JobReport:
    """Apply the step that `prepare(config, **uses)` returns to files. Outputs that are None are not
    written. `uses` are further JSON values on which the output depends; `options` are passed to
    `LineJob`."""
    uses = uses or {}
    job = LineJob(
        tool,
        inputs,
        [Path(path) for path in outputs if path],
        functools.partial(prepare, config, **uses),
        keys,
        json.loads(json.dumps({**asdict(config), **uses}, default=asdict)),
        **options,
    )
    return run(job, running)


def json_inputs(patterns: Iterable[str]) -> list[Path]:
    """Return the JSON-lines files among paths, globs and folders. Raises FileNotFoundError if a
    pattern matches none."""
    return expand_inputs(list(patterns), JSON_ENDINGS)
