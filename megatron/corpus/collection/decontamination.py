"""Takes out of a corpus what it shares with evaluation sets."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.corpus.collection.command import json_inputs, required
from megatron.corpus.collection.job import Job, Report, RunConfig, read_lines, run
from megatron.corpus.collection.lines import BadLine, Emit, Mapped, Record, map_records, records_of
from megatron.corpus.collection.ngrams import CutRule, Matcher, cuts, ngrams_of_task, pieces
from megatron.corpus.collection.outputs import write_packed
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch
from megatron.util.digests import sha256


@dataclass(frozen=True)
class FilterConfig:
    """Taking out n-grams of evaluation sets."""

    tasks: tuple[str, ...] = option(())
    """Evaluation sets known by name: lambada, which --lambada-path holds."""
    lambada_path: str | None = option(None)
    """LAMBADA as JSON lines with the key text."""
    task_file: tuple[str, ...] = option(())
    """Further evaluation sets: FILE:KEY for the texts under a key of JSON lines, FILE for a text
    file, each line of which is a text; plain or packed."""
    dedup_dataset: tuple[str, ...] = option(())
    """The corpus, JSON lines, and the key of its text: corpus.json text."""
    output: str | None = option(None)
    """The JSON-lines file to write; .gz or .zst at its end packs it. Without it, nothing but
    --save-dictionary is written."""
    max_ngram_size: int = option(13)
    """Words of an n-gram."""
    min_ngram_size: int = option(8)
    """Evaluation texts of fewer words are passed over; those between are one n-gram."""
    filter_text_char_len: int = option(200)
    """Pieces of fewer characters go."""
    key_threshold: int = option(10)
    """n-grams that the corpus has this often or more are common phrases, and stay (0: none is)."""
    splits_count: int = option(10)
    """Documents cut in more places go."""
    remove_char_each_side: int = option(200)
    """Characters that go on both sides of an n-gram, up to the ends of the sentences."""
    save_dictionary: str | None = option(None)
    """JSON file for the n-grams that are taken out, and how often the corpus has them."""
    load_dictionary: str | None = option(None)
    """Such a file, in the place of evaluation sets: the corpus is read once, not twice."""

    def check(self) -> None:
        """Raises ConfigError on flags that are missing or make no sense."""
        required(dedup_dataset=self.dedup_dataset)
        if len(self.dedup_dataset) != 2:
            raise ConfigError(
                f"--dedup-dataset {' '.join(self.dedup_dataset)} must be a file and the key of its "
                "text, such as corpus.json text"
            )
        if not self.output and not self.save_dictionary:
            raise ConfigError("--output is missing (or --save-dictionary)")
        for task in self.tasks:
            if task != "lambada":
                raise ConfigError(
                    f"--tasks {task} is not known: only lambada is, and nothing is fetched; give "
                    "the file of any evaluation set by --task-file FILE:KEY"
                )
        if "lambada" in self.tasks and not self.lambada_path:
            raise ConfigError("--tasks lambada needs --lambada-path, its file")
        sets = bool(self.tasks or self.task_file)
        if sets == bool(self.load_dictionary):
            raise ConfigError(
                "give evaluation sets (--tasks, --task-file) or --load-dictionary, one of the two"
            )
        if not 2 <= self.min_ngram_size <= self.max_ngram_size:
            raise ConfigError(
                f"--min-ngram-size {self.min_ngram_size} must be 2 or more, and not above "
                f"--max-ngram-size {self.max_ngram_size}"
            )


@dataclass(frozen=True)
class FilterReport:
    """What was found, and what was done about it."""

    ngrams: int
    """Of the evaluation sets."""
    found: int
    """Of these, those that the corpus has and that are no common phrases."""
    common: int
    """Common phrases: n-grams that the corpus has --key-threshold times or more."""
    filtered: Report | None
    """What became of the documents; None without --output."""

    def __str__(self) -> str:
        head = (
            f"{self.ngrams:,} n-grams of evaluation sets: {self.found:,} in the corpus, and "
            f"{self.common:,} common phrases, which stay"
        )
        return f"{head}\n{self.filtered}" if self.filtered else head


def filter_ngrams(config: FilterConfig, running: RunConfig) -> FilterReport:
    """Counts the n-grams of evaluation sets in a corpus, then cuts the rare ones out.

    Raises:
        ConfigError: a flag is missing or makes no sense.
        ValueError, OSError: see `job.run`; a malformed line of an evaluation set.
    """
    config.check()
    corpus, key = json_inputs(config.dedup_dataset[:1]), config.dedup_dataset[1]
    target = Path(config.output or f"{config.save_dictionary}")
    counted = target.with_name(target.name + ".counts")
    if config.load_dictionary:
        counts = load_dictionary(Path(config.load_dictionary))
    else:
        counts = count_ngrams(corpus, key, task_ngrams(config), counted, running)
    limit = config.key_threshold or max(counts.values(), default=0) + 1
    rare = {ngram: count for ngram, count in sorted(counts.items()) if 0 < count < limit}
    if config.save_dictionary:
        data = json.dumps({"ngrams": rare}, ensure_ascii=False, indent=0).encode()
        write_packed(Path(config.save_dictionary), data)
    report = _cut(config, corpus, frozenset(rare), running) if config.output else None
    counted.unlink(missing_ok=True)
    common = sum(count >= limit for count in counts.values())
    return FilterReport(len(counts), len(rare), common, report)


def _cut(
    config: FilterConfig, corpus: list[Path], ngrams: frozenset[str], running: RunConfig
) -> Report:
    assert config.output is not None
    key = config.dedup_dataset[1]
    rule = CutRule(config.remove_char_each_side, config.filter_text_char_len, config.splits_count)
    name = "-".join([*config.tasks, *map(_name_of, config.task_file)]) or "ngrams"
    step = CutStep(ngrams, key, rule, name)
    settings = {"rule": asdict(rule), "key": key, "name": name, "ngrams": _hash(ngrams)}
    job = Job("filter_ngrams", corpus, [Path(config.output)], step, settings=settings)
    return run(job, running)


def task_ngrams(config: FilterConfig) -> frozenset[str]:
    """The n-grams of all evaluation sets.

    Raises:
        ValueError: a malformed line, or a set without any n-gram; names the file.
    """
    ngrams: set[str] = set()
    files = [f"{config.lambada_path}:text"] if "lambada" in config.tasks else []
    for file in [*files, *config.task_file]:
        found: set[str] = set()
        for text in task_texts(file):
            found.update(ngrams_of_task(text, config.min_ngram_size, config.max_ngram_size))
        if not found:
            raise ValueError(f"{file} has no text of {config.min_ngram_size} words or more")
        print(f"{file}: {len(found):,} n-grams", file=sys.stderr)
        ngrams |= found
    return frozenset(ngrams)


def task_texts(file: str) -> Iterator[str]:
    """The texts of FILE:KEY or FILE.

    Raises:
        ValueError: a malformed line; names file and line.
        FileNotFoundError: there is no such file.
    """
    path, key = Path(file), ""
    if not path.exists() and ":" in file:
        name, _, key = file.rpartition(":")
        path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"the evaluation set {path} is no file")
    for batch in read_lines([path]):
        if not key:
            yield from (line.decode("utf-8", "replace") for line in batch.lines)
            continue
        for record in records_of(batch, (key,)):
            if isinstance(record, BadLine):
                raise ValueError(f"{path}, line {record.number}: {record.reason} ({record.detail})")
            yield record.fields[key]


@dataclass(frozen=True)
class CountStep:
    """How often the corpus has each n-gram."""

    ngrams: frozenset[str]
    key: str

    def build(self) -> BatchStep:
        matcher = Matcher(self.ngrams)

        def step(record: Record, counts: Counter[str]) -> Iterator[Emit]:
            counts.update(ngram for ngram, _ in matcher(record.fields[self.key]))
            yield from ()

        def batch_step(batch: LineBatch) -> Mapped:
            return map_records(batch, (self.key,), step, outputs=0)

        return batch_step


def count_ngrams(
    corpus: list[Path], key: str, ngrams: frozenset[str], counted: Path, running: RunConfig
) -> dict[str, int]:
    """How often a corpus has each n-gram, 0 included; kept in a file for a run stopped later."""
    job = Job(
        "filter_ngrams counting",
        corpus,
        [],
        CountStep(ngrams, key),
        settings={"key": key, "ngrams": _hash(ngrams)},
        journal=counted.with_name(counted.name + ".progress"),
    )
    description = job.description()
    try:
        found: dict[str, Any] = json.loads(counted.read_bytes())
        if found["description"] == description:
            counts = found["counts"]
            return {n: counts.get(n, 0) for n in ngrams}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    report = run(job, running)
    data = {"description": description, "counts": report.counts}
    write_packed(counted, json.dumps(data, ensure_ascii=False).encode())
    return {n: report.counts.get(n, 0) for n in ngrams}


@dataclass(frozen=True)
class CutStep:
    """Documents to what is left of them."""

    ngrams: frozenset[str]
    key: str
    rule: CutRule
    name: str
    """What the split_id of a piece begins with."""

    def build(self) -> BatchStep:
        matcher, rule = Matcher(self.ngrams), self.rule

        def step(record: Record, counts: Counter[str]) -> Iterator[Emit]:
            text = record.fields[self.key]
            matches = matcher(text)
            if not matches:
                counts["documents unchanged"] += 1
                yield 0, record.unchanged()
                return
            counts["n-grams found"] += len(matches)
            removed = cuts(text, (span for _, span in matches), rule.margin)
            left = pieces(text, removed, rule.min_characters)
            if len(removed) > rule.max_cuts:
                counts[f"documents left out: cut in more than {rule.max_cuts} places"] += 1
                return
            if not left:
                counts["documents left out: no piece is long enough"] += 1
                return
            counts["documents trimmed" if len(left) == 1 else "documents split"] += 1
            counts["pieces written"] += len(left)
            for number, piece in enumerate(left):
                own = f"{self.name}-{record.number:010d}-{number:04d}"
                before = record.fields.get("split_id")
                split_id = f"{before}-{own}" if before else own
                yield 0, record.replaced(**{self.key: piece, "split_id": split_id})

        def batch_step(batch: LineBatch) -> Mapped:
            return map_records(batch, (self.key,), step, outputs=1)

        return batch_step


def load_dictionary(path: Path) -> dict[str, int]:
    """The file of --save-dictionary.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        ngrams = json.loads(path.read_bytes())["ngrams"]
        if all(isinstance(c, int) and len(n.split(" ")) > 1 for n, c in ngrams.items()):
            return ngrams
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"--load-dictionary {path} is no file that --save-dictionary wrote")


def _name_of(task_file: str) -> str:
    return Path(task_file.partition(":")[0]).name.partition(".")[0]


def _hash(ngrams: frozenset[str]) -> str:
    return sha256("\n".join(sorted(ngrams)))
