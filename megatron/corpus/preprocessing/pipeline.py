"""The whole way from --input to .bin/.idx."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron.config import TokenizerConfig
from megatron.corpus.preprocessing.bad_lines import BadLineReport
from megatron.corpus.preprocessing.config import PreprocessConfig
from megatron.corpus.preprocessing.description import describe
from megatron.corpus.preprocessing.encode import EncodeConfig, Encoder
from megatron.corpus.preprocessing.job import (
    Job,
    Progressed,
    key_prefixes,
    lock_folder,
    publish,
)
from megatron.corpus.preprocessing.progress import Progress
from megatron.corpus.preprocessing.run import JobRun, open_job
from megatron.corpus.preprocessing.sources import Source, find_sources, partition
from megatron.corpus.preprocessing.summary import KeySummary, Summary
from megatron.data.indexed import IndexedDatasetWriter
from megatron.data.sentences import available_splitter
from megatron.util.processes import usable_processors

MERGED = "merged"
Made = TypeVar("Made")


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Summary:
    """Tokenizes the texts of the input and writes an indexed dataset for each key.

    The output is in the order of the input, whatever the number of workers and partitions, and is
    there whole or not at all. Memory does not grow with the input. A run that was killed is gone on
    with by the same call.

    Raises:
        ConfigError: a flag is missing or out of range.
        FileNotFoundError: an input or tokenizer file is missing.
        ValueError: a malformed line (unless they are skipped), a damaged file, no eod for
            --append-eod, nothing to write, or another process writes the same output; the message
            names file, line and finding.
        OSError: the output cannot be written.
    """
    config.check()
    sources = find_sources(config)
    encoder = Encoder(
        EncodeConfig(
            tokenizer=tokenizer_config,
            keys=config.json_keys,
            append_eod=config.append_eod,
            splitter=_chosen_splitter(config),
            lang=config.lang,
            keep_newlines=config.keep_newlines,
            stop_at_bad_line=config.on_bad_line == "error",
            max_line_bytes=config.max_line_bytes,
        )
    )
    if config.dataset_impl != "mmap":
        _say(f"--dataset-impl {config.dataset_impl}: the mmap format is written instead")
    return _Preprocessing(config, sources, encoder).run()


@dataclass(frozen=True)
class _Part:
    """A partition: its working folder, and what it reads."""

    folder: Path
    sources: list[Source]
    rank: int
    count: int


class _Preprocessing:
    """The partitions of a command, and what is made of them."""

    def __init__(
        self, config: PreprocessConfig, sources: Sequence[Source], encoder: Encoder
    ) -> None:
        self._config, self._encoder = config, encoder
        self._folder = Path(f"{config.output_prefix}.preprocessing")
        rank, count = config.partition_rank, config.partitions
        self._parts = [
            _Part(self._folder / f"part-{i}-of-{count}", partition(sources, i, count), i, count)
            for i in (range(count) if rank is None else [rank])
        ]
        self._workers = config.workers or usable_processors()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._position = 0
        size = sum(source.bytes_to_read for part in self._parts for source in part.sources)
        _say(
            f"input files: {len(sources):,}, {size / 1e6:,.1f} MB; "
            f"worker processes: {self._workers}"
        )
        self._progress = Progress(size, config.log_interval)

    def run(self) -> Summary:
        """Does what is left to do and publishes the output, if all of it is to be done here."""
        if self._config.partition_rank is not None:
            return self._summary(self._run_parts())
        with self._made(lambda: lock_folder(self._folder)):
            try:
                self._remove_other_parts()
                states = self._run_parts()
                summary = self._summary(states)
                self._check_any_document(summary)
                publish(self._merged(), self._final_prefixes())
                shutil.rmtree(self._folder)
                return summary
            finally:
                self._remove_if_bare()

    def _run_parts(self) -> list[Progressed]:
        if len(self._parts) == 1:
            return [self._run_part(self._parts[0], 0 if self._workers == 1 else self._workers)]
        at_once = min(len(self._parts), self._workers)
        shares = [len(range(i, self._workers, at_once)) for i in range(at_once)]
        with ThreadPoolExecutor(at_once) as threads:
            futures = [
                threads.submit(self._run_part, part, shares[number % at_once])
                for number, part in enumerate(self._parts)
            ]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                for future in futures:
                    if future.done():
                        future.result()
                return [future.result() for future in futures]
            finally:
                self._is_over.set()
                threads.shutdown(cancel_futures=True)

    def _run_part(self, part: _Part, workers: int) -> Progressed:
        description = describe(part.sources, self._encoder.config, part.rank, part.count)
        job = self._made(lambda: open_job(part.folder, description, self._encoder, _say))
        with closing(job):
            with self._lock:
                self._position += job.state.bytes_read
                self._progress.skip(job.state.bytes_read)
            if not job.state.is_complete:
                self._complete(job, part.sources, workers)
            return job.state

    def _complete(self, job: Job, sources: Sequence[Source], workers: int) -> None:
        run = JobRun(job, sources, self._encoder, workers, self._report, self._is_over.is_set)
        try:
            run.run()
        except ValueError:  # the same command would find the same again
            job.remove()
            raise
        except BaseException:  # an interrupt above all
            if job.has_journal:
                _say(f"{job.folder} keeps what is done; the same command goes on from there")
            else:
                job.remove()
            raise

    def _report(self, documents: int, text_bytes: int, bytes_read: int) -> None:
        with self._lock:
            self._position += bytes_read
            self._progress.update(documents, text_bytes, self._position)

    def _merged(self) -> list[Path]:
        """Prefixes of complete files, one for each key."""
        keys = self._config.json_keys
        if len(self._parts) == 1:
            return key_prefixes(self._parts[0].folder, keys)
        folder = self._folder / MERGED
        shutil.rmtree(folder, ignore_errors=True)
        merged = key_prefixes(folder, keys)
        of_parts = [key_prefixes(part.folder, keys) for part in self._parts]
        for number, prefix in enumerate(merged):
            with IndexedDatasetWriter(prefix, self._encoder.dtype) as writer:
                for of_part in of_parts:
                    writer.merge(of_part[number])
        return merged

    def _final_prefixes(self) -> list[str]:
        level = "sentence" if self._config.split_sentences else "document"
        return [f"{self._config.output_prefix}_{key}_{level}" for key in self._config.json_keys]

    def _summary(self, states: Sequence[Progressed]) -> Summary:
        self._progress.close()
        bad_lines = BadLineReport(stop=False)
        for state in states:
            bad_lines.merge(state.bad_lines, state.shown)
        if bad_lines.total:
            _say(str(bad_lines))
        is_part = self._config.partition_rank is not None
        prefixes = [key.prefix for key in states[0].keys] if is_part else self._final_prefixes()
        keys = [KeySummary(prefix) for prefix in prefixes]
        for state in states:
            keys = [key.joined(other) for key, other in zip(keys, state.keys, strict=True)]
        left = None
        if is_part:
            left = (
                f"part {self._config.partition_rank} of 0 to {self._config.partitions - 1} is "
                "done; when all are, the command without --partition-rank puts them together"
            )
        by_key = dict(zip(self._config.json_keys, keys, strict=True))
        return Summary(by_key, dict(bad_lines.by_reason), self._progress.seconds, left)

    def _check_any_document(self, summary: Summary) -> None:
        for name, key in summary.keys.items():
            if not key.documents:
                shutil.rmtree(self._folder)
                raise ValueError(
                    f"--input {' '.join(self._config.input)} holds no document under the key "
                    f'"{name}" ({key.empty} empty, {sum(summary.bad_lines.values())} malformed '
                    "lines); nothing is written"
                )

    def _remove_other_parts(self) -> None:
        ours = {part.folder for part in self._parts}
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder not in ours:
                with lock_folder(folder):
                    shutil.rmtree(folder)
                if folder.name != MERGED:
                    _say(f"{folder}: thrown away, the command has other --partitions now")

    def _remove_if_bare(self) -> None:
        if self._folder.is_dir() and not any(path.is_dir() for path in self._folder.iterdir()):
            shutil.rmtree(self._folder)

    def _made(self, make: Callable[[], Made]) -> Made:
        try:
            return make()
        except OSError as error:
            raise type(error)(
                error.errno,
                f"--output-prefix: cannot write in the folder {self._folder.parent}: "
                f"{error.strerror}",
            ) from error


def _chosen_splitter(config: PreprocessConfig) -> str | None:
    if not config.split_sentences:
        return None
    kind = config.sentence_splitter
    if kind == "auto":
        kind = available_splitter(config.lang)
        _say(f"--sentence-splitter auto: {kind}")
    return kind


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
