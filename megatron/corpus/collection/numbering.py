"""Gives each document an id, and puts files together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.config.flags import option
from megatron.corpus.collection.command import json_inputs, required
from megatron.corpus.collection.job import Job, Report, RunConfig, run
from megatron.corpus.collection.lines import Emit, Mapped, Record, map_records
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch


@dataclass(frozen=True)
class AddIdConfig:
    """Numbering documents."""

    input_file: tuple[str, ...] = option((), aliases=("--input",))
    """JSON-lines files, globs or folders, plain or packed by gzip or zstd."""
    output_file: str | None = option(None, aliases=("--output",))
    """The JSON-lines file to write; .gz or .zst at its end packs it."""
    id_prefix: str | None = option(None)
    """What an id begins with: PREFIX-0000000001 and so on."""
    id_key: str = option("adlr_id")
    """Key of the id."""


@dataclass(frozen=True)
class AddIdStep:
    """Numbers from 1 on, over all files."""

    prefix: str
    key: str

    def build(self) -> BatchStep:
        last = 0

        def step(record: Record, counts: Counter[str]) -> Iterator[Emit]:
            nonlocal last
            last += 1
            yield 0, record.replaced(**{self.key: f"{self.prefix}-{last:010d}"})

        return lambda batch: map_records(batch, (), step, outputs=1)


def add_ids(config: AddIdConfig, running: RunConfig) -> Report:
    """Writes the documents with an id each. A run that was stopped starts anew.

    Raises:
        ConfigError: a flag is missing.
        ValueError, OSError: see `job.run`.
    """
    required(
        input_file=config.input_file, output_file=config.output_file, id_prefix=config.id_prefix
    )
    assert config.output_file is not None and config.id_prefix is not None
    step = AddIdStep(config.id_prefix, config.id_key)
    job = Job(
        "add_id",
        json_inputs(config.input_file),
        [Path(config.output_file)],
        step,
        settings=asdict(step),
        resumable=False,
    )
    return run(job, running)


@dataclass(frozen=True)
class MergeConfig:
    """Putting files together."""

    json_path: tuple[str, ...] = option((".",), aliases=("--json_path", "--input"))
    """Folders with *.json or *.jsonl, plain or packed, or files, or globs; in order of name."""
    output_file: str = option("merged_output.json", aliases=("--output_file", "--output"))
    """The file to write; .gz or .zst at its end packs it."""


@dataclass(frozen=True)
class MergeStep:
    """Writes lines as they are, once they were seen to be JSON objects."""

    def build(self) -> BatchStep:
        return self

    def __call__(self, batch: LineBatch) -> Mapped:
        return map_records(batch, (), lambda record, _: [(0, record.unchanged())], outputs=1)


def merge(config: MergeConfig, running: RunConfig) -> Report:
    """Writes the lines of all files to one. The output, should it be there, is no input.

    Raises:
        ValueError, OSError: see `job.run`.
    """
    output = Path(config.output_file)
    inputs = [p for p in json_inputs(config.json_path) if p.resolve() != output.resolve()]
    if not inputs:
        raise FileNotFoundError(f"--json-path {' '.join(config.json_path)} has no file to merge")
    return run(Job("merge_jsons", inputs, [output], MergeStep()), running)
