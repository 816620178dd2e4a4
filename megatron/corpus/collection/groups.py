"""Groups of near-duplicates, and corpora with one document of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config.flags import option
from megatron.corpus.collection.command import json_inputs, required
from megatron.corpus.collection.job import Job, Report, RunConfig, read_lines, run
from megatron.corpus.collection.lines import (
    Emit,
    Mapped,
    Record,
    json_line,
    map_records,
    records_of,
    value_of,
)
from megatron.corpus.collection.outputs import write_packed
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch
from megatron.util.digests import sha256


@dataclass(frozen=True)
class GroupConfig:
    """Grouping near-duplicates."""

    input: str | None = option(None)
    """The file that find_duplicates.py wrote."""
    output: str | None = option(None)
    """File of the groups: a line {"number": ["id", ...]} each."""
    threshold: float = option(0.7)
    """Similarity from which on two documents belong together; not below that of the search."""


@dataclass(frozen=True)
class GroupReport:
    """What was grouped."""

    groups: int
    documents: int

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents in {self.groups:,} groups; "
            f"{self.documents - self.groups:,} of them can go"
        )


def group_duplicates(config: GroupConfig, running: RunConfig) -> GroupReport:
    """Writes the connected components of the pairs.

    In each group the ids stand in the order in which the file names them; the first is the
    document that came first.

    Raises:
        ConfigError: a flag is missing.
        ValueError: a line is not as find_duplicates.py writes it; names file and line.
    """
    required(input=config.input, output=config.output)
    assert config.input is not None and config.output is not None
    parents: dict[str, str] = {}

    def root_of(name: str) -> str:
        while parents.setdefault(name, name) != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    for first, second, value in read_pairs(Path(config.input)):
        if value >= config.threshold:
            older, newer = root_of(first), root_of(second)
            parents[newer] = older
    groups: dict[str, list[str]] = {}
    for name in list(parents):
        groups.setdefault(root_of(name), []).append(name)
    lines = [json_line({str(i): names}) for i, names in enumerate(groups.values())]
    write_packed(Path(config.output), b"".join(lines))
    return GroupReport(len(groups), len(parents))


def read_pairs(path: Path) -> Iterator[tuple[str, str, float]]:
    """The pairs in a file of find_duplicates.py.

    Raises:
        ValueError: a line is not of that form; names file and line.
    """
    for record in _records(path):
        try:
            for first, others in record.fields.items():
                for other in others:
                    for second, value in other.items():
                        yield first, second, float(value)
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f'{path}, line {record.number}: not {{"id": [{{"other id": similarity}}, ...]}}'
            ) from None


def _records(path: Path) -> Iterator[Record]:
    for batch in read_lines([path]):
        for record in records_of(batch, ()):
            if not isinstance(record, Record):
                raise ValueError(f"{path}, line {record.number}: {record.reason} ({record.detail})")
            yield record


@dataclass(frozen=True)
class RemoveConfig:
    """Removing near-duplicates."""

    groups: str | None = option(None)
    """The file that group_duplicate_url.py wrote."""
    input: tuple[str, ...] = option(())
    """JSON-lines files, globs or folders, plain or packed by gzip or zstd."""
    output: str | None = option(None)
    """The JSON-lines file to write; .gz or .zst at its end packs it."""
    removed: str | None = option(None)
    """A file for the documents left out."""
    id_key: str = option("url")
    """Key of the ids."""
    text_key: str = option("text")
    """Key of the text, to count the characters left out."""


@dataclass(frozen=True)
class RemoveStep:
    """Leaves out the documents whose ids are listed."""

    ids: frozenset[str]
    id_key: str
    text_key: str
    keeps_removed: bool

    def build(self) -> BatchStep:
        def step(record: Record, counts: Counter[str]) -> Iterator[Emit]:
            if str(value_of(record, self.id_key)) in self.ids:
                counts["documents left out"] += 1
                counts["characters left out"] += len(record.fields.get(self.text_key) or "")
                if self.keeps_removed:
                    yield 1, record.unchanged()
            else:
                counts["documents written"] += 1
                yield 0, record.unchanged()

        def batch_step(batch: LineBatch) -> Mapped:
            return map_records(batch, (), step, 2 if self.keeps_removed else 1)

        return batch_step


def remove_duplicates(config: RemoveConfig, running: RunConfig) -> Report:
    """Writes the documents, without all but the first of each group.

    Raises:
        ConfigError: a flag is missing.
        ValueError, OSError: see `job.run`; groups that group_duplicate_url.py did not write.
    """
    required(groups=config.groups, input=config.input, output=config.output)
    assert config.groups is not None and config.output is not None
    ids: set[str] = set()
    for record in _records(Path(config.groups)):
        for names in record.fields.values():
            if not isinstance(names, list):
                raise ValueError(
                    f'{config.groups}, line {record.number}: not {{"number": ["id", ...]}}'
                )
            ids.update(map(str, names[1:]))
    outputs = [Path(path) for path in (config.output, config.removed) if path]
    step = RemoveStep(frozenset(ids), config.id_key, config.text_key, bool(config.removed))
    listed = sha256(json.dumps(sorted(ids)))
    settings = {"ids": listed, "id_key": config.id_key}
    job = Job(
        "remove_group_duplicates", json_inputs(config.input), outputs, step, settings=settings
    )
    return run(job, running)
