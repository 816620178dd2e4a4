"""Tools that split, number, merge and shuffle a corpus, or mark sentence boundaries."""

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
    """Options for splitting a corpus into train, valid and test."""

    input: tuple[str, ...] = option((), aliases=("--input-files", "--input_files"))
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output_dir: str | None = option(None, aliases=("--output_dir",))
    """Folder for train.jsonl, valid.jsonl and test.jsonl."""
    split: str = option("90,5,5")
    """Proportions of train, valid and test. Only their ratio matters."""
    method: str = option("hash", choices=("hash", "exact"))
    """Assignment of documents to splits. hash uses each text's hash, independently of other texts,
    and proportions are approximate. exact orders the documents by this hash and cuts at exact
    proportions."""
    key: str = option("text")
    """Key whose value is hashed. Documents with the same value are in the same split."""
    seed: int = option(1234)
    """Seed of the hash. A different seed gives a different split."""
    pack: str = option("none", choices=("none", "gz", "zst"))
    """Compression of the output files."""


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
    """Return the step that writes a document to the first split whose bound exceeds its hash."""

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        value = hash_of(record, config.key, config.seed)
        part = next(i for i, bound in enumerate(bounds) if value < bound)
        counts[f"to {PARTS[part]}"] += 1
        yield part, record.unchanged()

    return step


def hash_of(record: JsonRecord, key: str, seed: int) -> int:
    """Return a 64-bit BLAKE2b hash of the value under a key. The hash is keyed with the seed.
    Raises BadRecordError if the record lacks the key."""
    value = record.value(key)
    data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    return hash64(data, str(seed).encode())


def cumulative_shares(split: str) -> tuple[float, ...]:
    """Return the cumulative fractions of train, valid and test. The last is exactly 1. Raises
    ConfigError unless `split` consists of three non-negative numbers with a positive sum."""
    try:
        numbers = [float(number) for number in split.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
        raise ConfigError(f"--split {split} must be three numbers such as 90,5,5")
    return tuple(sum(numbers[: i + 1]) / sum(numbers) for i in range(3))


def exact_bounds(hashes: npt.NDArray[np.uint64], ends: Sequence[float]) -> tuple[int, ...]:
    """Return bounds that divide documents by their `hashes` [n] at the cumulative fractions `ends`,
    of which the last is 1. The division is as close as documents with equal hashes allow."""
    values, counts = np.unique(hashes, return_counts=True)
    # number of documents below each distinct hash, and their total
    below = np.concatenate(([0], np.cumsum(counts)))
    bounds = []
    for end in ends[:-1]:
        cut = int(np.argmin(np.abs(below - round(end * len(hashes)))))
        bounds.append(int(values[cut]) if cut < len(values) else _HASHES)
    return (*bounds, _HASHES)


def _hashes(inputs: Sequence[Path], config: SplitConfig) -> npt.NDArray[np.uint64]:
    """Return the hashes of all documents. Malformed lines are skipped, because the second pass over
    the files reports them."""
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
    """Options for numbering documents."""

    input_file: tuple[str, ...] = option((), aliases=("--input",))
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output_file: str | None = option(None, aliases=("--output",))
    """JSON-lines file to write, compressed if its name ends in .gz or .zst."""
    id_prefix: str | None = option(None)
    """Prefix of the ids, which have the form PREFIX-0000000001."""
    id_key: str = option("adlr_id")
    """Key under which the id is stored."""


def add_ids(config: AddIdConfig, running: LineJobConfig) -> JobReport:
    """Write the documents, adding an id to each. An interrupted run starts over."""
    inputs, output, _ = required(config, "input_file", "output_file", "id_prefix")
    files = json_inputs(inputs)
    return run_step(config, running, "add_id", _number_step, files, [output], resumable=False)


def _number_step(config: AddIdConfig) -> RecordStep:
    """Return the step that numbers documents from 1, across all files."""
    last = 0

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        nonlocal last
        last += 1
        yield 0, record.replaced(**{config.id_key: f"{config.id_prefix}-{last:010d}"})

    return step


@dataclass(frozen=True)
class MergeConfig:
    """Options for merging files."""

    json_path: tuple[str, ...] = option((".",), aliases=("--json_path", "--input"))
    """Files, globs, or folders of *.json or *.jsonl to merge in name order, plain or compressed."""
    output_file: str = option("merged_output.json", aliases=("--output_file", "--output"))
    """File to write, compressed if its name ends in .gz or .zst."""


def merge(config: MergeConfig, running: LineJobConfig) -> JobReport:
    """Write the lines of all files to one file. An existing output file is not used as an input.
    Raises the errors of `line_job.run`."""
    output = Path(config.output_file)
    inputs = [p for p in json_inputs(config.json_path) if p.resolve() != output.resolve()]
    if not inputs:
        raise FileNotFoundError(f"--json-path {' '.join(config.json_path)} has no file to merge")
    return run_step(config, running, "merge_jsons", _merge_step, inputs, [output])


def _merge_step(_: MergeConfig) -> RecordStep:
    return lambda record, counts: [(0, record.unchanged())]


@dataclass(frozen=True)
class PresplitConfig:
    """Options for splitting documents into sentences."""

    input: tuple[str, ...] = option(())
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output: str | None = option(None)
    """JSON-lines file to write, compressed if its name ends in .gz or .zst."""
    text_key: str = option("text")
    """Key of the text in each record."""
    sentence_splitter: str = option("auto", choices=("auto", "punkt", "rules"))
    """Sentence splitting method: NLTK's punkt, a few rules, or auto, which is punkt if its data is
    installed and the rules otherwise."""
    lang: str = option("english")
    """Language of the text."""


def presplit(config: PresplitConfig, running: LineJobConfig) -> JobReport:
    """Write every document with one sentence per line, as --presplit-sentences expects."""
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
    """Return the step that puts a line feed after each sentence, and nowhere else."""
    split = build_splitter(splitter, config.lang, keep_newlines=False)

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        # A line break within a sentence would be taken for the end of the sentence.
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
    """Options for shuffling a corpus into train.json, dev.json and test.json."""

    input_files: tuple[str, ...] = option((), aliases=("--input_files",))
    """JSON-lines files to shuffle."""
    output_dir: str | None = option(None, aliases=("--output_dir",))
    """Folder for train.json, dev.json and test.json. Each has a .map file with two columns that
    locate every document: the number of its file in --input-files and its line, both from 0."""
    test_percent: tuple[float, ...] = option((0.05, 0.0), aliases=("--test_percent",))
    """Sizes of dev and test as fractions of the documents, rounded up. test may be omitted."""
    seed: int = option(1234)
    """Seed of the shuffle. A different seed gives a different order."""


def shuffled_split(config: ShuffledSplitConfig) -> str:
    """Shuffle the documents and cut them at exact proportions, as Megatron-LM's first release
    (2019) did. Return the sizes of the splits as text. Raises ConfigError if --test-percent is
    invalid, ValueError if a line exceeds 64 MiB, and OSError if a file cannot be read or
    written."""
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
    """Yield the file number, line number and byte offset of every non-empty line."""
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
