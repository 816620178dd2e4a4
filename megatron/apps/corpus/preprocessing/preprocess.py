"""The preprocessing command: from --input to .bin and .idx files."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from megatron.apps.corpus.indexed_files import merge_datasets
from megatron.apps.corpus.indexed_writer import publish
from megatron.apps.corpus.preprocessing.inputs import (
    InputFile,
    PreprocessConfig,
    find_inputs,
    partition,
)
from megatron.apps.corpus.preprocessing.job import (
    BadLines,
    JobState,
    KeySummary,
    PreprocessJob,
    PreprocessSummary,
    key_prefixes,
    lock_folder,
)
from megatron.apps.corpus.preprocessing.readers import BlockEncoder, EncodeConfig
from megatron.apps.corpus.progress import Progress
from megatron.config import TokenizerConfig
from megatron.features.raw_text.encoder import TextSettings, available_splitter
from megatron.util.workers import usable_processors

MERGED = "merged"
Made = TypeVar("Made")


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> PreprocessSummary:
    """Tokenize the texts of the input and write an indexed dataset for each key.

    The output is in input order, whatever the number of workers and partitions. It appears only
    when it is complete. Memory use does not depend on the size of the input. Repeating the call
    resumes a killed run.

    Raises ValueError if a line is malformed (unless such lines are skipped), a file is damaged,
    --append-eod is set without an eod token, the result is empty, or another process writes the
    same output. Raises ConfigError if a flag is wrong, and OSError if a file is missing or cannot
    be written.
    """
    config.check()
    inputs = find_inputs(config)
    text = TextSettings(
        tokenizer_config,
        append_eod=config.append_eod,
        splitter=_chosen_splitter(config),
        lang=config.lang,
        keep_newlines=config.keep_newlines,
    )
    stop_at_bad_line = config.on_bad_line == "error"
    encoder = BlockEncoder(
        EncodeConfig(text, config.json_keys, stop_at_bad_line, config.max_line_bytes)
    )
    if config.dataset_impl != "mmap":
        _say(f"--dataset-impl {config.dataset_impl}: the mmap format is written instead")
    return _Preprocessing(config, inputs, encoder).run()


class _Preprocessing:
    """The partitions of one command. `_parts` maps their work folders to their input files."""

    def __init__(
        self, config: PreprocessConfig, inputs: Sequence[InputFile], encoder: BlockEncoder
    ) -> None:
        self._config, self._encoder = config, encoder
        self._folder = Path(f"{config.output_prefix}.preprocessing")
        rank, count = config.partition_rank, config.partitions
        self._parts = {
            self._folder / f"part-{i}-of-{count}": list(partition(inputs, i, count))
            for i in (range(count) if rank is None else [rank])
        }
        self._workers = config.workers or usable_processors()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._position = 0
        size = sum(file.bytes_to_read for part in self._parts.values() for file in part)
        _say(
            f"input files: {len(inputs):,}, {size / 1e6:,.1f} MB; worker processes: {self._workers}"
        )
        self._progress = Progress(size, config.log_interval)

    def run(self) -> PreprocessSummary:
        """Process the remaining partitions and publish the output, or with --partition-rank process
        only that partition."""
        if self._config.partition_rank is not None:
            return self._summary(self._run_parts())
        with self._made(lambda: lock_folder(self._folder)):
            try:
                self._remove_other_parts()
                summary = self._summary(self._run_parts())
                self._check_any_document(summary)
                for prefix, final in zip(self._merged(), self._final_prefixes(), strict=True):
                    files = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
                    publish(*files, final, self._encoder.mark)
                shutil.rmtree(self._folder)
                return summary
            finally:
                folder = self._folder
                if folder.is_dir() and not any(path.is_dir() for path in folder.iterdir()):
                    shutil.rmtree(folder)

    def _run_parts(self) -> list[JobState]:
        if len(self._parts) == 1:
            workers = 0 if self._workers == 1 else self._workers
            return [self._run_part(folder, workers) for folder in self._parts]
        at_once = min(len(self._parts), self._workers)
        shares = [len(range(i, self._workers, at_once)) for i in range(at_once)]
        with ThreadPoolExecutor(at_once) as threads:
            futures = [
                threads.submit(self._run_part, folder, shares[number % at_once])
                for number, folder in enumerate(self._parts)
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

    def _run_part(self, folder: Path, workers: int) -> JobState:
        job = self._made(lambda: PreprocessJob(folder, self._parts[folder], self._encoder))
        with closing(job):
            if job.notice:
                _say(f"{folder}: {job.notice}")
            with self._lock:
                self._position += job.state.bytes_read
                self._progress.skip(job.state.bytes_read)
            try:
                job.run(workers, self._report, self._is_over.is_set)
            except BaseException as error:  # including an interrupt
                if job.has_journal and not isinstance(error, ValueError):
                    _say(f"{folder} keeps what is done; the same command continues from there")
                else:  # a repeated command would fail at the same malformed line
                    job.remove()
                raise
            return job.state

    def _report(self, documents: int, text_bytes: int, bytes_read: int) -> None:
        with self._lock:
            self._position += bytes_read
            self._progress.update(documents, text_bytes, self._position)

    def _merged(self) -> list[Path]:
        keys = self._config.json_keys
        if len(self._parts) == 1:
            return key_prefixes(next(iter(self._parts)), keys)
        folder = self._folder / MERGED
        shutil.rmtree(folder, ignore_errors=True)
        merged = key_prefixes(folder, keys)
        of_parts = [key_prefixes(part, keys) for part in self._parts]
        for number, prefix in enumerate(merged):
            merge_datasets([str(of_part[number]) for of_part in of_parts], str(prefix))
        return merged

    def _final_prefixes(self) -> list[str]:
        level = "sentence" if self._config.split_sentences else "document"
        return [f"{self._config.output_prefix}_{key}_{level}" for key in self._config.json_keys]

    def _summary(self, states: Sequence[JobState]) -> PreprocessSummary:
        self._progress.close()
        config, left = self._config, None
        prefixes = self._final_prefixes()
        if config.partition_rank is not None:
            prefixes = [key.prefix for key in states[0].keys]
            left = (
                f"part {config.partition_rank} of 0 to {config.partitions - 1} is done; when all "
                "are, the command without --partition-rank puts them together"
            )
        bad_lines, keys = BadLines(), [KeySummary(prefix) for prefix in prefixes]
        for state in states:
            bad_lines.merge(state.bad_lines)
            for key, of_part in zip(keys, state.keys, strict=True):
                key.add(of_part)
        if bad_lines.by_reason:
            _say(str(bad_lines))
        by_key = dict(zip(config.json_keys, keys, strict=True))
        return PreprocessSummary(by_key, bad_lines.by_reason, self._progress.seconds, left)

    def _check_any_document(self, summary: PreprocessSummary) -> None:
        for name, key in summary.keys.items():
            if not key.documents:
                shutil.rmtree(self._folder)
                raise ValueError(
                    f"--input {' '.join(self._config.input)} contains no document under the key "
                    f'"{name}" ({key.empty} empty, {sum(summary.bad_lines.values())} malformed '
                    "lines); nothing is written"
                )

    def _remove_other_parts(self) -> None:
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder not in self._parts:
                with lock_folder(folder):
                    shutil.rmtree(folder)
                if folder.name != MERGED:
                    _say(f"{folder}: discarded, since the command has other --partitions now")

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
