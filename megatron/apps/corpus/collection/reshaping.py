"""Parts, numbers, sentences and merged files of a corpus; texts stay as they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.apps.corpus.collection.json_files import (
    BadRecordError,
    JsonRecord,
    RecordStep,
    read_lines,
    records_of,
)
from megatron.apps.corpus.collection.line_job import (
    JobReport,
    LineJobConfig,
    json_inputs,
    required,
    run_on_json,
)
from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.data.text_encoder import available_splitter, build_splitter
from megatron.util.digests import hash64

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
    """Writes each document to its part."""
    patterns, folder = required(config, "input", "output_dir")
    ends = cumulative_shares(config.split)
    if config.method == "exact":
        bounds = exact_bounds(_hashes(json_inputs(patterns), config), ends)
    else:
        bounds = tuple(round(end * _HASHES) for end in ends)
    ending = ".jsonl" if config.pack == "none" else f".jsonl.{config.pack}"
    outputs = [Path(folder, part + ending) for part in PARTS]
    uses = {"bounds": bounds}
    return run_on_json(config, running, "split_json", _split_step, patterns, outputs, uses=uses)


def _split_step(config: SplitConfig, bounds: Sequence[int]) -> RecordStep:
    """Part i gets the documents whose hash is below bounds[i] and not below bounds[i - 1]."""

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        value = hash_of(record, config.key, config.seed)
        part = next(i for i, bound in enumerate(bounds) if value < bound)
        counts[f"to {PARTS[part]}"] += 1
        yield part, record.unchanged()

    return step


def hash_of(record: JsonRecord, key: str, seed: int) -> int:
    """64 bits of BLAKE2b, keyed by the seed, of the value of a key; BadRecordError without such a
    key."""
    value = record.value(key)
    data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    return hash64(data, str(seed).encode())


def cumulative_shares(split: str) -> tuple[float, ...]:
    """Where train, valid and test end, as shares of all; the last is exactly 1. Raises ConfigError
    unless these are three numbers from 0 up with a sum above 0."""
    try:
        numbers = [float(number) for number in split.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
        raise ConfigError(f"--split {split} must be three numbers such as 90,5,5")
    return tuple(sum(numbers[: i + 1]) / sum(numbers) for i in range(3))


def exact_bounds(hashes: npt.NDArray[np.uint64], ends: Sequence[float]) -> tuple[int, ...]:
    """Bounds that cut the documents, of which `hashes` are [n], at the given cumulative shares, the
    last of which is 1, as near as equal texts let them."""
    values, counts = np.unique(hashes, return_counts=True)
    below = np.concatenate(([0], np.cumsum(counts)))  # documents before each different hash
    bounds = []
    for end in ends[:-1]:
        cut = int(np.argmin(np.abs(below - round(end * len(hashes)))))
        bounds.append(int(values[cut]) if cut < len(values) else _HASHES)
    return (*bounds, _HASHES)


def _hashes(inputs: Sequence[Path], config: SplitConfig) -> npt.NDArray[np.uint64]:
    """Of all documents, without malformed lines, which the second reading reports."""
    parts = [np.empty(0, np.uint64)]
    for batch in read_lines(inputs):
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
    """Writes the documents with an id each. A run that was stopped starts again."""
    inputs, output, _ = required(config, "input_file", "output_file", "id_prefix")
    step, outputs = _number_step, [output]
    return run_on_json(config, running, "add_id", step, inputs, outputs, resumable=False)


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
    """Writes the lines of all files to one. The output, if it exists, is no input. Errors: see
    `line_job.run`."""
    output = Path(config.output_file)
    inputs = [str(p) for p in json_inputs(config.json_path) if p.resolve() != output.resolve()]
    if not inputs:
        raise FileNotFoundError(f"--json-path {' '.join(config.json_path)} has no file to merge")
    return run_on_json(config, running, "merge_jsons", _merge_step, inputs, [output])


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
    """Writes every document with a line for each sentence, as --presplit-sentences reads them."""
    inputs, output = required(config, "input", "output")
    splitter = config.sentence_splitter
    splitter = available_splitter(config.lang) if splitter == "auto" else splitter
    build_splitter(splitter, config.lang, keep_newlines=False)
    return run_on_json(
        config,
        running,
        "presplit_sentences_json",
        _presplit_step,
        inputs,
        [output],
        keys=(config.text_key,),
        uses={"splitter": splitter},
    )


def _presplit_step(config: PresplitConfig, splitter: str) -> RecordStep:
    """Puts a line feed after each sentence, and only there."""
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
