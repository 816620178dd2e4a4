"""The whole way from --input to .bin/.idx."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from megatron.config import TokenizerConfig
from megatron.data.indexed import IndexedDatasetWriter
from megatron.data.preprocessing.bad_lines import BadLineReport
from megatron.data.preprocessing.config import PreprocessConfig
from megatron.data.preprocessing.encode import (
    EncodeConfig,
    EncodedBatch,
    EncodedDocuments,
    Encoder,
)
from megatron.data.preprocessing.inputs import (
    JSON_ENDINGS,
    expand_inputs,
    read_batches,
    total_bytes,
)
from megatron.data.preprocessing.pool import encode_in_processes
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.sentences import available_splitter


@dataclass(frozen=True)
class KeySummary:
    """What was written for one key."""

    prefix: str
    """Of the .bin and .idx."""
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the texts."""
    empty: int = 0
    """Texts without a token, left out."""

    def plus(self, part: EncodedDocuments) -> KeySummary:
        """After `part` has been written, too."""
        return KeySummary(
            self.prefix,
            self.documents + len(part.sequences_per_document),
            self.sequences + len(part.sequence_lengths),
            self.tokens + len(part.tokens),
            self.text_bytes + part.text_bytes,
            self.empty + part.empty,
        )


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
    input_bytes = total_bytes(paths)
    if config.dataset_impl != "mmap":
        _say(f"--dataset-impl {config.dataset_impl}: the mmap format is written instead")
    _say(f"input files: {len(paths):,}, {input_bytes / 1e6:,.1f} MB; worker processes: {workers}")

    level = "sentence" if config.split_sentences else "document"
    keys = {key: KeySummary(f"{config.output_prefix}_{key}_{level}") for key in config.json_keys}
    progress = Progress(input_bytes, config.log_interval)
    bad_lines = BadLineReport(stop=encode_config.stop_at_bad_line)
    with ExitStack() as stack:
        writers = [stack.enter_context(_writer(key.prefix, encoder)) for key in keys.values()]
        encoded = _encoded(paths, config.chunk_size, encoder, workers)
        for batch in stack.enter_context(closing(encoded)):
            bad_lines.add(batch.path, batch.bad_lines)
            for name, writer, part in zip(keys, writers, batch.documents, strict=True):
                writer.add_documents(
                    part.tokens, part.sequence_lengths, part.sequences_per_document
                )
                keys[name] = keys[name].plus(part)
            progress.update(
                max(len(part.sequences_per_document) for part in batch.documents),
                sum(part.text_bytes for part in batch.documents),
                batch.position,
            )
        progress.close()
        if bad_lines.total:
            _say(str(bad_lines))
        for name, key in keys.items():
            if not key.documents:
                raise ValueError(
                    f'--input {" ".join(config.input)} holds no document under the key "{name}" '
                    f"({key.empty} empty, {bad_lines.total} malformed lines); nothing is written"
                )
    return Summary(keys, dict(bad_lines.by_reason), progress.seconds)


def _encoded(
    paths: list[Path], chunk_size: int, encoder: Encoder, workers: int
) -> Generator[EncodedBatch, None, None]:
    batches = read_batches(paths, chunk_size)
    if workers == 1:
        yield from map(encoder, batches)
    else:
        yield from encode_in_processes(batches, encoder.config, workers)


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


def _usable_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
