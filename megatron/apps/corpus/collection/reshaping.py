"""Parts, numbers, sentences and merged files of a corpus; texts stay as they are."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.apps.corpus.collection.json_files import (
    BadRecordError,
    JsonRecord,
    RecordStep,
    records_of,
)
from megatron.apps.corpus.collection.line_job import (
    JobReport,
    LineJobConfig,
    json_inputs,
    required,
    run_step,
)
from megatron.apps.corpus.preprocessing.inputs import read_batches
from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.data.corpora import expand
from megatron.features.raw_text.encoder import available_splitter, build_splitter
from megatron.features.raw_text.records import long_line, read_lines
from megatron.util.digests import hash64
from megatron.util.files import replacing, sync

PARTS = ("train", "valid", "test")
_HASHES = 1 << 64


@dataclass(frozen=True)
class SplitConfig:
    """Splitting a corpus into train, valid and test."""

    input: tuple[str, ...] = option((), aliases=("--input-files", "--input_files"))
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output_dir: str | None = option(None, aliases=("--output_dir",))
    """Folder for train.jsonl, valid.jsonl and test.jsonl."""
    split: str = option("90,5,5")
    """Shares of train, valid and test; only their ratio counts."""
    method: str = option("hash", choices=("hash", "exact"))
    """hash: the hash of a text decides its part, independently of the rest of the corpus; the
    shares are approximate. exact: the same hash orders a shuffle, which is cut at the exact
    shares."""
    key: str = option("text")
    """Key that is hashed; documents with the same value under it are in the same part."""
    seed: int = option(1234)
    """Another seed makes another split."""
    pack: str = option("none", choices=("none", "gz", "zst"))
    """Compression of the parts."""


def split_corpus(config: SplitConfig, running: LineJobConfig) -> JobReport:
    patterns, folder = required(config, "input", "output_dir")
    inputs = json_inputs(patterns)
    ends = cumulative_shares(config.split)
    if config.method == "exact":
        bounds = exact_bounds(_hashes(inputs, config), ends)
    else:
        bounds = tuple(round(end * _HASHES) for end in ends)
    ending = ".jsonl" if config.pack == "none" else f".jsonl.{config.pack}"
    outputs = [Path(folder, part + ending) for part in PARTS]
    uses = {"bounds": bounds}
    return run_step(config, running, "split_json", _split_step, inputs, outputs, uses=uses)


def _split_step(config: SplitConfig, bounds: Sequence[int]) -> RecordStep:
    """Part i gets the documents whose hash is below bounds[i] and not below bounds[i - 1]."""

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        value = hash_of(record, config.key, config.seed)
        part = next(i for i, bound in enumerate(bounds) if value < bound)
        counts[f"to {PARTS[part]}"] += 1
        yield part, record.unchanged()

    return step


def hash_of(record: JsonRecord, key: str, seed: int) -> int:
    """Return 64 bits of the BLAKE2b hash, keyed with the seed, of the value of a key. Raises
    BadRecordError."""
    value = record.value(key)
    data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    return hash64(data, str(seed).encode())


def cumulative_shares(split: str) -> tuple[float, ...]:
    """Return the ends of train, valid and test as shares of all; the last is exactly 1. Raises
    ConfigError unless these are three numbers from 0 up with a sum above 0."""
    try:
        numbers = [float(number) for number in split.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
        raise ConfigError(f"--split {split} must be three numbers such as 90,5,5")
    return tuple(sum(numbers[: i + 1]) / sum(numbers) for i in range(3))


def exact_bounds(hashes: npt.NDArray[np.uint64], ends: Sequence[float]) -> tuple[int, ...]:
    """Return bounds that divide documents with `hashes` [n] at cumulative shares, ending with 1, as
    closely as identical texts allow."""
    values, counts = np.unique(hashes, return_counts=True)
    below = np.concatenate(([0], np.cumsum(counts)))  # documents before each different hash
    bounds = []
    for end in ends[:-1]:
        cut = int(np.argmin(np.abs(below - round(end * len(hashes)))))
        bounds.append(int(values[cut]) if cut < len(values) else _HASHES)
    return (*bounds, _HASHES)


def _hashes(inputs: Sequence[Path], config: SplitConfig) -> npt.NDArray[np.uint64]:
    """Return the hashes of all documents. The second reading reports malformed lines."""
    parts = [np.empty(0, np.uint64)]
    for batch in read_batches(inputs):
        hashes = []
        for record in records_of(batch):
            if isinstance(record, JsonRecord):
                with suppress(BadRecordError):
                    hashes.append(hash_of(record, config.key, config.seed))
        parts.append(np.array(hashes, np.uint64))
    return np.concatenate(parts)


@dataclass(frozen=True)
class AddIdConfig:
    """Numbering documents."""

    input_file: tuple[str, ...] = option((), aliases=("--input",))
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output_file: str | None = option(None, aliases=("--output",))
    """The JSON-lines file to write, compressed if its name ends in .gz or .zst."""
    id_prefix: str | None = option(None)
    """Beginning of each id: PREFIX-0000000001 and so on."""
    id_key: str = option("adlr_id")
    """Key of the id."""


def add_ids(config: AddIdConfig, running: LineJobConfig) -> JobReport:
    """Write the documents with an id each. A run that was stopped starts again."""
    inputs, output, _ = required(config, "input_file", "output_file", "id_prefix")
    files = json_inputs(inputs)
    return run_step(config, running, "add_id", _number_step, files, [output], resumable=False)


def _number_step(config: AddIdConfig) -> RecordStep:
    """Numbers from 1 on, over all files."""
    last = 0

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        nonlocal last
        last += 1
        yield 0, record.replaced(**{config.id_key: f"{config.id_prefix}-{last:010d}"})

    return step


@dataclass(frozen=True)
class MergeConfig:
    """Merging files."""

    json_path: tuple[str, ...] = option((".",), aliases=("--json_path", "--input"))
    """Folders with *.json or *.jsonl, plain or compressed, or files, or globs; in order of name."""
    output_file: str = option("merged_output.json", aliases=("--output_file", "--output"))
    """The file to write, compressed if its name ends in .gz or .zst."""


def merge(config: MergeConfig, running: LineJobConfig) -> JobReport:
    """Write the lines of all files to one. The output, if it exists, is no input. Errors: see
    `line_job.run`."""
    output = Path(config.output_file)
    inputs = [p for p in json_inputs(config.json_path) if p.resolve() != output.resolve()]
    if not inputs:
        raise FileNotFoundError(f"--json-path {' '.join(config.json_path)} has no file to merge")
    return run_step(config, running, "merge_jsons", _merge_step, inputs, [output])


def _merge_step(_: MergeConfig) -> RecordStep:
    return lambda record, counts: [(0, record.unchanged())]


@dataclass(frozen=True)
class PresplitConfig:
    """Splitting documents into sentences."""

    input: tuple[str, ...] = option(())
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output: str | None = option(None)
    """The JSON-lines file to write, compressed if its name ends in .gz or .zst."""
    text_key: str = option("text")
    """Key of the text."""
    sentence_splitter: str = option("auto", choices=("auto", "punkt", "rules"))
    """How sentences are found: by NLTK's punkt, by a few rules, or by punkt if its data is
    installed."""
    lang: str = option("english")
    """Language of the text."""


def presplit(config: PresplitConfig, running: LineJobConfig) -> JobReport:
    """Write every document with a line for each sentence, as --presplit-sentences reads them."""
    inputs, output = required(config, "input", "output")
    splitter = config.sentence_splitter
    splitter = available_splitter(config.lang) if splitter == "auto" else splitter
    build_splitter(splitter, config.lang, keep_newlines=False)
    return run_step(
        config,
        running,
        "presplit_sentences_json",
        _presplit_step,
        json_inputs(inputs),
        [output],
        keys=(config.text_key,),
        uses={"splitter": splitter},
    )


def _presplit_step(config: PresplitConfig, splitter: str) -> RecordStep:
    """Put a line feed after each sentence, and only there."""
    split = build_splitter(splitter, config.lang, keep_newlines=False)

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        # A line break inside a sentence would read as its end.
        sentences = [" ".join(s.split("\n")) for s in split(record.fields[config.text_key])]
        if sentences:
            counts["sentences written"] += len(sentences)
            yield 0, record.replaced(**{config.text_key: "\n".join(sentences)})
        else:
            counts["empty documents left out"] += 1

    return step


FILES = ("train.json", "dev.json", "test.json")
_HEADER = b"file\tline #\n"


@dataclass(frozen=True)
class ShuffledSplitConfig:
    """Shuffling a corpus into train.json, dev.json and test.json."""

    input_files: tuple[str, ...] = option((), aliases=("--input_files",))
    """JSON-lines files."""
    output_dir: str | None = option(None, aliases=("--output_dir",))
    """Folder for train.json, dev.json and test.json, and of each a .map: file (from 0, in the order
    of --input-files) and line (from 0) of every document, in columns."""
    test_percent: tuple[float, ...] = option((0.05, 0.0), aliases=("--test_percent",))
    """Shares of dev and test as fractions of the documents, rounded up; test may be left out."""
    seed: int = option(1234)
    """Another seed makes another order."""


def shuffled_split(config: ShuffledSplitConfig) -> str:
    """Shuffle and cut documents at exact shares, as Megatron-LM's first release (2019) did, and
    return how many each part has. Raises ConfigError for shares that are not fractions; ValueError
    for a line of more than 64 MiB; OSError if a file cannot be read or written."""
    patterns, folder = required(config, "input_files", "output_dir")
    shares = (*config.test_percent, 0.0)[:2]
    if len(config.test_percent) > 2 or min(shares) < 0 or sum(shares) > 1:
        raise ConfigError(
            f"--test-percent {' '.join(map(str, config.test_percent))} must be one or two "
            "fractions such as 0.05 0, with a sum of at most 1"
        )
    paths = [path for pattern in patterns for path in expand(pattern, (".json", ".jsonl"))]
    places = np.array(list(_places(paths)), np.int64).reshape(-1, 3)
    held_out = [min(math.ceil(share * len(places)), len(places)) for share in shares]
    order = np.random.RandomState(config.seed).permutation(len(places))
    bounds = np.cumsum([max(len(places) - sum(held_out), 0), held_out[0]])
    Path(folder).mkdir(parents=True, exist_ok=True)
    parts = np.split(places[order], bounds)
    for name, part in zip(FILES, parts, strict=True):
        _write(Path(folder, name), paths, part)
    return ", ".join(f"{len(p):,} in {n}" for n, p in zip(FILES, parts, strict=True))


def _places(paths: Sequence[Path]) -> Iterator[tuple[int, int, int]]:
    """Yield file, line and offset of every line that is not empty."""
    for number, path in enumerate(paths):
        with path.open("rb") as file:
            for line, (offset, content) in enumerate(read_lines(file)):
                if too_long := long_line(content, line + 1):
                    raise ValueError(f"{path}, line {too_long.number}: {too_long.reason}")
                if content.strip():
                    yield number, line, offset


def _write(path: Path, inputs: Sequence[Path], places: np.ndarray) -> None:
    with ExitStack() as stack:
        sources = [stack.enter_context(each.open("rb")) for each in inputs]
        parts = [stack.enter_context(replacing(Path(f"{path}{end}"))) for end in ("", ".map")]
        lines, rows = (stack.enter_context(part.open("xb")) for part in parts)
        rows.write(_HEADER)
        for file, line, offset in places.tolist():
            sources[file].seek(offset)
            lines.write(sources[file].readline().strip() + b"\n")
            rows.write(f"{file}\t{line}\n".encode())
        sync(lines)
        sync(rows)
