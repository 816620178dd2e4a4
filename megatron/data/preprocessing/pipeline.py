"""The whole way from --input to .bin/.idx."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megatron.config import TokenizerConfig
from megatron.data.indexed import IndexedDatasetWriter
from megatron.data.preprocessing.config import PreprocessConfig
from megatron.data.preprocessing.encode import (
    EncodeConfig,
    EncodedBatch,
    Encoder,
    encode_in_worker,
    start_worker,
)
from megatron.data.preprocessing.inputs import (
    JSON_ENDINGS,
    LineBatch,
    expand_inputs,
    read_batches,
    total_bytes,
)
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.records import BadLine
from megatron.data.preprocessing.sentences import available_splitter

_BATCHES_PER_WORKER = 3
_BAD_LINES_SHOWN = 5


@dataclass(frozen=True)
class KeySummary:
    """What was written for one key."""

    prefix: str
    """Of the .bin and .idx."""
    documents: int
    sequences: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the texts."""
    empty: int
    """Texts without a token, left out."""


@dataclass(frozen=True)
class Summary:
    """What preprocessing did."""

    keys: dict[str, KeySummary]
    bad_lines: dict[str, int]
    """Lines left out, by reason."""
    seconds: float


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Summary:
    """Tokenizes the texts of JSON-lines files and writes an indexed dataset for each key.

    The output is in the order of the input, whatever the number of workers, and is there whole or
    not at all. Memory does not grow with the input, but for 12 bytes a document.

    Raises:
        ConfigError: a flag is missing or out of range.
        FileNotFoundError: an input or tokenizer file is missing.
        ValueError: a malformed line (unless they are skipped), a damaged file, no eod for
            --append-eod, or nothing to write; the message names file, line and finding.
        OSError: the output cannot be written.
    """
    config.check()
    paths = expand_inputs(config.input, JSON_ENDINGS)
    encode_config = EncodeConfig(
        tokenizer=tokenizer_config,
        keys=config.json_keys,
        append_eod=config.append_eod,
        splitter=_chosen_splitter(config),
        lang=config.lang,
        keep_newlines=config.keep_newlines,
        stop_at_bad_line=config.on_bad_line == "error",
    )
    encoder = Encoder(encode_config)
    workers = config.workers or _usable_processors()
    if config.dataset_impl != "mmap":
        _say(f"--dataset-impl {config.dataset_impl}: the mmap format is written instead")
    _say(f"{len(paths):,} files, {total_bytes(paths) / 1e6:,.1f} MB, {workers} workers")

    progress = Progress(total_bytes(paths), config.log_interval)
    bad = _BadLines(stop=encode_config.stop_at_bad_line)
    level = "sentence" if config.split_sentences else "document"
    prefixes = {key: f"{config.output_prefix}_{key}_{level}" for key in config.json_keys}
    summaries = {key: KeySummary(prefix, 0, 0, 0, 0, 0) for key, prefix in prefixes.items()}
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(_writer(prefix, encoder)) for key, prefix in prefixes.items()
        }
        batches = read_batches(paths, config.chunk_size)
        encoded = _encoded(batches, encode_config, encoder, workers)
        for batch in stack.enter_context(closing(encoded)):
            bad.add(batch)
            for (key, writer), part in zip(writers.items(), batch.documents, strict=True):
                writer.add_documents(
                    part.tokens, part.sequence_lengths, part.sequences_per_document
                )
                summary = summaries[key]
                summaries[key] = dataclasses.replace(
                    summary,
                    documents=summary.documents + len(part.sequences_per_document),
                    sequences=summary.sequences + len(part.sequence_lengths),
                    tokens=summary.tokens + len(part.tokens),
                    text_bytes=summary.text_bytes + part.text_bytes,
                    empty=summary.empty + part.empty,
                )
            progress.update(
                max(len(part.sequences_per_document) for part in batch.documents),
                sum(part.text_bytes for part in batch.documents),
                batch.position,
            )
        progress.close()
        bad.report()
        for key, summary in summaries.items():
            if not summary.documents:
                raise ValueError(
                    f'--input {" ".join(config.input)} holds no document under the key "{key}" '
                    f"({summary.empty} empty, {bad.total} malformed lines); nothing is written"
                )
    return Summary(summaries, dict(bad.by_reason), progress.seconds)


def _chosen_splitter(config: PreprocessConfig) -> str | None:
    if not config.split_sentences:
        return None
    kind = config.sentence_splitter
    if kind == "auto":
        kind = available_splitter(config.lang)
        _say(f"--sentence-splitter auto: {kind}")
    return kind


def _writer(prefix: str, encoder: Encoder) -> IndexedDatasetWriter:
    try:
        return IndexedDatasetWriter(prefix, encoder.dtype)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"--output-prefix: cannot write in the folder {Path(prefix).parent}: {error.strerror}",
        ) from error


def _encoded(
    batches: Iterable[LineBatch], config: EncodeConfig, encoder: Encoder, workers: int
) -> Generator[EncodedBatch, None, None]:
    """The batches encoded, in order; a bounded number of them is under way at a time."""
    if workers == 1:
        yield from map(encoder, batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        # A forked child of a process with threads (Rust's, in tokenizers) may hang.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(config,),
    )
    batches = iter(batches)
    under_way: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in islice(batches, workers * _BATCHES_PER_WORKER):
            under_way.append(pool.submit(encode_in_worker, batch))
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(pool.submit(encode_in_worker, batch) for batch in islice(batches, 1))
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker process died, most often because memory ran out; use fewer --workers or a "
            "smaller --chunk-size"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _BadLines:
    """Malformed lines: the first ends the run, or all are counted."""

    def __init__(self, stop: bool) -> None:
        self._stop = stop
        self._shown: list[str] = []
        self.by_reason: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.by_reason.total()

    def add(self, batch: EncodedBatch) -> None:
        for line in batch.bad_lines:
            if self._stop:
                raise ValueError(
                    f"--input {_located(batch.path, line)}; a line must be a JSON object with the "
                    "strings of --json-keys (--on-bad-line skip leaves such lines out)"
                )
            self.by_reason[line.reason] += 1
            if len(self._shown) < _BAD_LINES_SHOWN:
                self._shown.append(_located(batch.path, line))

    def report(self) -> None:
        if not self.total:
            return
        reasons = ", ".join(f"{count:,} x {reason}" for reason, count in self.by_reason.items())
        _say(f"{self.total:,} malformed lines left out: {reasons}")
        for shown in self._shown:
            _say(f"  {shown}")
        if self.total > len(self._shown):
            _say(f"  and {self.total - len(self._shown):,} more")


def _located(path: Path, line: BadLine) -> str:
    return f"{path}, line {line.number}: {line.reason} ({line.detail})"


def _usable_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
