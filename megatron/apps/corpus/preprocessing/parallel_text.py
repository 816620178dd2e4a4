"""Indexed files from one side of a parallel corpus with one sentence per line
(``tools/preprocess_data_nmt.py``).

Line N of one language corresponds to line N of the other, so no line may be left out.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import ConfigError, TokenizerConfig
from megatron.config.flags import option
from megatron.features.raw_text.encoder import TextEncoder, TextSettings
from megatron.tokenizer.mark import mark_of
from megatron.util.progress import say
from megatron.util.workers import map_in_order

_LINES = 1000  # number of lines that a process tokenizes at a time
_SECONDS_BETWEEN_LINES = 1.0
Lines = tuple[int, list[str]]  # number of the first line, from 1, and the sentences


@dataclass(frozen=True)
class ParallelTextConfig:
    """Options for preprocessing one side of a parallel corpus."""

    input: str | None = option(None)
    """Text file with one sentence per line and no empty lines."""
    output_prefix: str | None = option(None)
    """PREFIX of the files PREFIX.bin and PREFIX.idx. Each line becomes a document."""
    dataset_impl: str = option("mmap", choices=("mmap", "lazy", "cached"))
    """Format of the output. All values write mmap."""
    workers: int = option(1)
    """Number of processes that tokenize."""
    log_interval: int = option(100)
    """Number of sentences between progress lines, which appear at most once per second."""

    def __post_init__(self) -> None:
        """Check the flags. Raises ConfigError if one is missing or out of range."""
        if self.input is None:
            raise ConfigError("--input is missing: the file to read")
        if self.output_prefix is None:
            raise ConfigError("--output-prefix is missing: the files PREFIX.bin and PREFIX.idx")
        for flag, value in (("--workers", self.workers), ("--log-interval", self.log_interval)):
            if value < 1:
                raise ConfigError(f"{flag} {value} must be positive")


def _prepare(encode: TextEncoder, path: str) -> Callable[[Lines], list[np.ndarray]]:
    """Return the function that a worker process uses to encode a block of sentences."""

    def encoded(block: Lines) -> list[np.ndarray]:
        first, sentences = block
        documents = encode(sentences)
        for number, document in enumerate(documents, first):
            if not document:
                raise ValueError(
                    f"--input {path}, line {number} has no token: each line must have a "
                    "sentence, since line N of the other language belongs to line N"
                )
        return [document[0] for document in documents]

    return encoded


def preprocess_sentences(config: ParallelTextConfig, tokenizer: TokenizerConfig) -> str:
    """Write the output files, which appear only when they are complete, and return a summary.
    Raises ValueError if the file is empty or if a line has no token or is not UTF-8, ConfigError if
    a flag is wrong, and OSError if a file cannot be read or written."""
    path, prefix, start = Path(str(config.input)), str(config.output_prefix), time.perf_counter()
    if not path.is_file():
        raise ConfigError(f"--input {path}: there is no such file")
    if config.dataset_impl != "mmap":
        say(f"--dataset-impl {config.dataset_impl}: the mmap format is written instead")
    encode = TextEncoder(TextSettings(tokenizer))
    mark = mark_of(encode.tokenizer, tokenizer.tokenizer_type)
    prepare = functools.partial(_prepare, encode, str(path))
    count = tokens = 0
    shown = start
    with IndexedDatasetWriter(prefix, encode.dtype, None if mark is None else mark.json()) as out:
        workers = config.workers if config.workers > 1 else 0
        for _, sentences in map_in_order(_blocks(path), prepare, workers):
            lengths = list(map(len, sentences))
            out.add_documents(np.concatenate(sentences), lengths, [1] * len(lengths))
            due = (count + len(lengths)) // config.log_interval > count // config.log_interval
            count, tokens, now = count + len(lengths), tokens + sum(lengths), time.perf_counter()
            if due and now - shown >= _SECONDS_BETWEEN_LINES:
                shown = now
                say(f"{count:,} sentences, {count / (now - start):,.0f} a second")
        if not count:
            raise ValueError(f"--input {path} is empty; nothing is written")
    seconds = time.perf_counter() - start
    return f"{prefix}.bin/.idx: {count:,} sentences, {tokens:,} tokens, {seconds:.1f} seconds"


def _blocks(path: Path) -> Iterator[Lines]:
    number = 1
    with path.open("rb") as file:
        while lines := list(itertools.islice(file, _LINES)):
            sentences = []
            for place, line in enumerate(lines, number):
                try:
                    text = line.decode("utf-8-sig" if place == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"--input {path}, line {place} is not UTF-8 text: {error.reason}"
                    ) from None
                sentences.append(text.strip())
            yield number, sentences
            number += len(lines)
