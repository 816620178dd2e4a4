"""Removal of the word n-grams that a corpus shares with evaluation sets.

This is the rule of GPT-3 (Brown et al. 2020, appendix C) as implemented in Megatron's script. Where
a text shares 13 consecutive words with an evaluation set, they are cut out together with 200
characters on both sides, up to the nearest ends of sentences. Pieces of fewer than 200 characters
are dropped. A document that is cut in more than 10 places is dropped completely.

datatrove's decontamination drops every document with a match, needs lighteval for its index, and
took 9 CPU seconds where this takes 1 (LAMBADA in 1,000 documents of OpenWebText).
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.apps.corpus.collection.json_files import (
    JsonRecord,
    RecordStep,
    read_records,
    write_packed,
)
from megatron.apps.corpus.collection.line_job import (
    JobReport,
    LineJob,
    LineJobConfig,
    json_inputs,
    required,
    run,
)
from megatron.apps.corpus.preprocessing.inputs import read_batches
from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.features.raw_text.records import long_line
from megatron.util.digests import sha256

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"[.!?]")
Span = tuple[int, int]


@dataclass(frozen=True)
class FilterConfig:
    """Options for removing n-grams of evaluation sets."""

    tasks: tuple[str, ...] = option(())
    """Built-in evaluation sets. Only lambada is available; --lambada-path is its file."""
    lambada_path: str | None = option(None)
    """LAMBADA as JSON lines, with the text under the key text."""
    task_file: tuple[str, ...] = option(())
    """Further evaluation sets, plain or compressed. FILE:KEY reads the texts under a key of JSON
    lines or in a column of a .tsv file (GLUE), FOLDER:KEY the texts in all files of a folder
    (RACE), and FILE a text file with one text per line (WikiText)."""
    dedup_dataset: tuple[str, ...] = option(())
    """JSON-lines corpus, followed by the key of its text, for example corpus.json text."""
    output: str | None = option(None)
    """JSON-lines file to write, compressed if its name ends in .gz or .zst. Without this flag, only
    --save-dictionary is written."""
    max_ngram_size: int = option(13)
    """Number of words in an n-gram."""
    min_ngram_size: int = option(8)
    """Minimum number of words in an evaluation text. Shorter texts are skipped. A text with at
    least this many words, but fewer than --max-ngram-size, is a single n-gram."""
    filter_text_char_len: int = option(200)
    """Minimum number of characters in a piece. Shorter pieces are dropped."""
    key_threshold: int = option(10)
    """Number of occurrences from which an n-gram is a common phrase, which is not cut. 0 cuts
    all."""
    splits_count: int = option(10)
    """Maximum number of cuts in a document. Documents with more cuts are dropped."""
    remove_char_each_side: int = option(200)
    """Number of characters to cut on both sides of an n-gram, up to the ends of sentences."""
    save_dictionary: str | None = option(None)
    """JSON file for the n-grams to cut, with their number of occurrences in the corpus."""
    load_dictionary: str | None = option(None)
    """File from --save-dictionary to use instead of evaluation sets, to read the corpus once."""

    def check(self) -> None:
        required(self, "dedup_dataset")
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


class FilterReport(NamedTuple):
    ngrams: int  # number of n-grams in the evaluation sets
    found: int  # number of these in the corpus, without common phrases
    common: int  # number of common phrases (at least --key-threshold times in the corpus)
    filtered: JobReport | None
    sets: Mapping[str, tuple[int, int]] = MappingProxyType({})
    """Two counts for each evaluation set: its texts that share an n-gram with the corpus (common
    phrases excluded), and its texts that are long enough to contain an n-gram."""

    def __str__(self) -> str:
        head = (
            f"{self.ngrams:,} n-grams of evaluation sets: {self.found:,} in the corpus, and "
            f"{self.common:,} common phrases, which stay"
        )
        lines = [
            f"{name}: {overlaps:,} of {texts:,} texts share n-grams with the corpus"
            for name, (overlaps, texts) in self.sets.items()
        ]
        return "\n".join([head, *lines, *([str(self.filtered)] if self.filtered else [])])


def filter_ngrams(config: FilterConfig, running: LineJobConfig) -> FilterReport:
    """Count the n-grams of evaluation sets in a corpus, then cut out all but common phrases."""
    config.check()
    corpus, key = json_inputs(config.dedup_dataset[:1]), config.dedup_dataset[1]
    target = Path(config.output or f"{config.save_dictionary}")
    counted = target.with_name(target.name + ".counts")
    sets: dict[str, list[frozenset[str]]] = {}
    if config.load_dictionary:
        counts = load_dictionary(Path(config.load_dictionary))
    else:
        sets = ngrams_of_sets(config)
        every = frozenset[str]().union(*itertools.chain.from_iterable(sets.values()))
        counts = count_ngrams(corpus, key, every, counted, running)
    limit = config.key_threshold or max(counts.values(), default=0) + 1
    rare = {ngram: count for ngram, count in sorted(counts.items()) if 0 < count < limit}
    if config.save_dictionary:
        data = json.dumps({"ngrams": rare}, ensure_ascii=False, indent=0).encode()
        write_packed(Path(config.save_dictionary), data)
    report = _cut(config, corpus, frozenset(rare), running) if config.output else None
    counted.unlink(missing_ok=True)
    common = sum(count >= limit for count in counts.values())
    shared = {
        name: (sum(not rare.keys().isdisjoint(text) for text in texts), sum(map(bool, texts)))
        for name, texts in sets.items()
    }
    return FilterReport(len(counts), len(rare), common, report, shared)


def _cut(
    config: FilterConfig, corpus: list[Path], ngrams: frozenset[str], running: LineJobConfig
) -> JobReport:
    names = [Path(file.partition(":")[0]).name.partition(".")[0] for file in config.task_file]
    name = "-".join([*config.tasks, *names]) or "ngrams"
    keys = ("remove_char_each_side", "filter_text_char_len", "splits_count", "dedup_dataset")
    settings = {key: getattr(config, key) for key in keys}
    job = LineJob(
        "filter_ngrams",
        corpus,
        [Path(config.output or "")],
        functools.partial(_cut_step, config, ngrams, name),
        (config.dedup_dataset[1],),
        {**settings, "name": name, "ngrams": _hash(ngrams)},
    )
    return run(job, running)


def ngrams_of_sets(config: FilterConfig) -> dict[str, list[frozenset[str]]]:
    """Return the n-grams of every text of each evaluation set, keyed by the set as given in the
    flags. Raises ValueError if a line is malformed, or if a set has no n-grams."""
    files = [f"{config.lambada_path}:text"] if "lambada" in config.tasks else []
    sets: dict[str, list[frozenset[str]]] = {}
    for file in [*files, *config.task_file]:
        sizes = config.min_ngram_size, config.max_ngram_size
        sets[file] = [frozenset(ngrams_of_task(text, *sizes)) for text in task_texts(file)]
        count = len(frozenset[str]().union(*sets[file]))
        if not count:
            raise ValueError(f"{file} has no text of {config.min_ngram_size} words or more")
        print(f"{file}: {count:,} n-grams", file=sys.stderr)
    return sets


def count_ngrams(
    corpus: list[Path], key: str, ngrams: frozenset[str], counted: Path, running: LineJobConfig
) -> dict[str, int]:
    """Count each n-gram in a corpus. The counts are stored in the file `counted`, so that a
    repeated run can reuse them."""
    job = LineJob(
        "filter_ngrams counting",
        corpus,
        [],
        functools.partial(_count_step, ngrams, key),
        (key,),
        {"key": key, "ngrams": _hash(ngrams)},
        journal=counted.with_name(counted.name + ".progress"),
    )
    description = job.description()
    try:
        content: dict[str, Any] = json.loads(counted.read_bytes())
        if content["description"] == description:
            return {ngram: content["counts"].get(ngram, 0) for ngram in ngrams}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    counts = run(job, running).counts
    data = {"description": description, "counts": counts}
    write_packed(counted, json.dumps(data, ensure_ascii=False).encode())
    return {ngram: counts.get(ngram, 0) for ngram in ngrams}


def _count_step(ngrams: frozenset[str], key: str) -> RecordStep:
    matcher = Matcher(ngrams)

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        counts.update(ngram for ngram, _ in matcher(record.fields[key]))
        yield from ()

    return step


def _cut_step(config: FilterConfig, ngrams: frozenset[str], name: str) -> RecordStep:
    """Return the step that cuts documents. `name` becomes part of each piece's split_id."""
    matcher, key = Matcher(ngrams), config.dedup_dataset[1]

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        text = record.fields[key]
        matches = matcher(text)
        if not matches:
            counts["documents unchanged"] += 1
            yield 0, record.unchanged()
            return
        counts["n-grams found"] += len(matches)
        removed = cuts(text, (span for _, span in matches), config.remove_char_each_side)
        left = pieces(text, removed, config.filter_text_char_len)
        if len(removed) > config.splits_count:
            counts[f"documents left out: cut in more than {config.splits_count} places"] += 1
            return
        if not left:
            counts["documents left out: no piece is long enough"] += 1
            return
        counts["documents trimmed" if len(left) == 1 else "documents split"] += 1
        counts["pieces written"] += len(left)
        before = record.fields.get("split_id")
        for number, piece in enumerate(left):
            suffix = f"{name}-{record.number:010d}-{number:04d}"
            split_id = f"{before}-{suffix}" if before else suffix
            yield 0, record.replaced(**{key: piece, "split_id": split_id})

    return step


def load_dictionary(path: Path) -> dict[str, int]:
    """Read a file that --save-dictionary wrote. Raises ValueError for any other content."""
    try:
        ngrams = json.loads(path.read_bytes())["ngrams"]
        if all(isinstance(c, int) and len(n.split(" ")) > 1 for n, c in ngrams.items()):
            return ngrams
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"--load-dictionary {path} is not a file that --save-dictionary wrote")


def _hash(ngrams: frozenset[str]) -> str:
    return sha256("\n".join(sorted(ngrams)))


def words_of(text: str) -> list[tuple[str, int, int]]:
    """Return the lower-case words of a text, each with its start and end in the text."""
    return [(match[0].lower(), match.start(), match.end()) for match in _WORD.finditer(text)]


def ngrams_of_task(text: str, shortest: int, longest: int) -> Iterator[str]:
    """Yield the n-grams of an evaluation text: every run of `longest` words, joined by spaces. A
    shorter text is a single n-gram if it has at least `shortest` words; otherwise it has none."""
    words = [word for word, _, _ in words_of(text)]
    if shortest <= len(words) < longest:
        yield " ".join(words)
    for i in range(len(words) - longest + 1):
        yield " ".join(words[i : i + longest])


class Matcher:
    def __init__(self, ngrams: Iterable[str]) -> None:
        """``ngrams`` are lower-case, have two or more words, and are joined by single spaces."""
        self._ngrams: frozenset[str] = frozenset(ngrams)
        lengths: dict[tuple[str, str], set[int]] = {}
        for ngram in self._ngrams:
            words = ngram.split(" ")
            assert len(words) > 1
            lengths.setdefault((words[0], words[1]), set()).add(len(words))
        # An index by the first two words is fast, because few positions in a text match a pair.
        self._lengths = {pair: sorted(pair_lengths) for pair, pair_lengths in lengths.items()}

    def __call__(self, text: str) -> list[tuple[str, Span]]:
        """Return the n-grams in a text, ordered by start, each with its span of characters."""
        located = words_of(text)
        words = [word for word, _, _ in located]
        matches = []
        for i, pair in enumerate(zip(words, words[1:], strict=False)):
            for length in self._lengths.get(pair, ()):
                ngram = " ".join(words[i : i + length])
                if i + length <= len(words) and ngram in self._ngrams:
                    matches.append((ngram, (located[i][1], located[i + length - 1][2])))
        return matches


def cuts(text: str, spans: Iterable[Span], margin: int) -> list[Span]:
    """Return the spans to cut from a text, in order and separated from each other. A span starts at
    the last end of a sentence at least `margin` characters before an n-gram. It ends at the first
    end of a sentence more than `margin` characters after the n-gram."""
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    merged: list[Span] = []
    for start, end in sorted(spans):
        start = ends[bisect_right(ends, max(start - margin, 0)) - 1]
        end = ends[bisect_right(ends, min(end + margin, len(text) - 1))]
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def pieces(text: str, removed: Iterable[Span], min_characters: int) -> list[str]:
    """Return the pieces of a text that are left between the cuts, stripped of white space. Pieces
    with fewer than `min_characters` characters are dropped."""
    ends = [0, *itertools.chain.from_iterable(removed), len(text)]
    parts = (text[start:end].strip() for start, end in zip(ends[::2], ends[1::2], strict=True))
    return [part for part in parts if len(part) >= max(min_characters, 1)]


def task_texts(file: str) -> Iterator[str]:
    """Yield the texts of an evaluation set, given as FILE:KEY, FOLDER:KEY or FILE.

    - KEY of JSON lines: a string, or strings in nested lists, such as RACE's ``questions`` and
      ``options``. In a folder, all .txt and .json files are read, as RACE requires.
    - KEY of a .tsv file: the name of a column in the first line, or the number of a column, from 0,
      if the file has no header line (CoLA).
    - No KEY: the lines of a text file, such as WikiText's.

    Raises FileNotFoundError if the file is missing, and ValueError, naming file and line, if a line
    is malformed.
    """
    path, key = Path(file), ""
    if not path.exists() and ":" in file:
        name, _, key = file.rpartition(":")
        path = Path(name)
    if path.is_dir():
        yield from _of_folder(path, key)
    elif not path.is_file():
        raise FileNotFoundError(f"the evaluation set {path} is not a file")
    elif not key:
        yield from (line for _, line in _lines(path))
    elif ".tsv" in path.suffixes:
        yield from _of_table(path, key)
    else:
        yield from _of_records(path, key)


def _of_folder(folder: Path, key: str) -> Iterator[str]:
    if not key:
        raise ValueError(f"{folder} is a folder: give FOLDER:KEY, such as {folder}:article of RACE")
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".json"))
    if not files:
        raise ValueError(f"{folder} has no .txt or .json file")
    for path in files:
        yield from _of_records(path, key)


def _of_records(path: Path, key: str) -> Iterator[str]:
    for record in read_records(path):
        if key not in record.fields:
            known = ", ".join(record.fields) or "none"
            raise ValueError(f'{path}, line {record.number}: no key "{key}"; its keys: {known}')
        texts = list(_strings(record.fields[key]))
        if not texts:
            raise ValueError(f'{path}, line {record.number}: "{key}" has no text')
        yield from texts


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in nested lists, in order."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += reversed(value)


def _of_table(path: Path, key: str) -> Iterator[str]:
    lines = _lines(path)
    if key.isdecimal():
        column = int(key)
    else:
        names = next(lines, (1, ""))[1].split("\t")
        if key not in names:
            raise ValueError(f"{path}, line 1: no column {key!r}; its columns: {', '.join(names)}")
        column = names.index(key)
    for number, line in lines:
        cells = line.split("\t")
        if column >= len(cells):
            raise ValueError(f"{path}, line {number}: {len(cells)} columns, none is {key}")
        yield cells[column]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for batch in read_batches([path]):
        for number, line in enumerate(batch.lines, batch.first_line):
            if too_long := long_line(line, number):
                raise ValueError(f"{path}, line {number}: {too_long.reason} ({too_long.detail})")
            yield number, line.decode("utf-8", "replace").rstrip("\r\n")
