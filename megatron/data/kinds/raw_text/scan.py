"""The one pass over text files that finds their documents and counts their tokens."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.data.json_lines import BadLine
from megatron.data.kinds.raw_text.encode import TextEncoder, TextSettings
from megatron.data.kinds.raw_text.records import Records
from megatron.util.processes import mapping_processes, usable_processors

logger = logging.getLogger(__name__)

_WORTH_PROCESSES = 1 << 25
"""Bytes of text from which on starting processes, each with its tokenizer, pays."""
_TEXTS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 20
_SHOWN_BYTES = 60


class Scanned(NamedTuple):
    """The documents of a range of a file, those without a token left out."""

    offsets: np.ndarray
    """Where the records begin in the file, int64[d]."""
    sequence_lengths: np.ndarray
    """Tokens in each sequence, int32[n]."""
    sequences_per_document: np.ndarray
    """int32[d]."""


def scan(
    records: Sequence[Records], encoder: TextEncoder, workers: int | None = None
) -> dict[str, np.ndarray]:
    """Reads all records and counts the tokens of their documents.

    Args:
        workers: processes; without it as many as there are processors, for 32 MiB of text or more.

    Returns:
        record_offsets, int64[documents]: where each record begins, in the files back to back;
        sequence_lengths, int32[sequences]; document_indices, int64[documents + 1].

    Raises:
        ValueError: a record is malformed or cannot be tokenized; names file and line.
        ChildProcessError: a process died.
    """
    bases = list(accumulate((r.file.size for r in records), initial=0))
    tasks = [
        (r, base, span) for r, base in zip(records, bases, strict=False) for span in r.ranges()
    ]
    if workers is None:
        workers = usable_processors() if bases[-1] >= _WORTH_PROCESSES else 1
    offsets, lengths, counts = [], [], []
    for (_, base, _), part in zip(tasks, _scanned(tasks, encoder, workers), strict=True):
        offsets.append(part.offsets + base)
        lengths.append(part.sequence_lengths)
        counts.append(part.sequences_per_document)
    per_document = np.concatenate([np.empty(0, np.int32), *counts])
    indices = np.zeros(len(per_document) + 1, np.int64)
    np.cumsum(per_document, out=indices[1:])
    return {
        "record_offsets": np.concatenate([np.empty(0, np.int64), *offsets]),
        "sequence_lengths": np.concatenate([np.empty(0, np.int32), *lengths]),
        "document_indices": indices,
    }


Task = tuple[Records, int, tuple[int, int]]


def _scanned(tasks: list[Task], encoder: TextEncoder, workers: int) -> Iterator[Scanned]:
    if workers == 1 or len(tasks) < 2:
        yield from (scan_range(records, span, encoder) for records, _, span in tasks)
        return
    sources, _, spans = zip(*tasks, strict=True)
    died = "a process that counts tokens died, most often because memory ran out"
    with mapping_processes(min(workers, len(tasks)), died) as each:
        yield from each(_scan_in_process, sources, spans, repeat(encoder.settings))


@lru_cache(maxsize=1)
def _encoder(settings: TextSettings) -> TextEncoder:
    """One in each process: loading a vocabulary for every range would take longer than the text."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return TextEncoder(settings)


def _scan_in_process(records: Records, span: tuple[int, int], settings: TextSettings) -> Scanned:
    return scan_range(records, span, _encoder(settings))


def scan_range(records: Records, span: tuple[int, int], encoder: TextEncoder) -> Scanned:
    """The documents of the records that begin in a range of bytes.

    Raises:
        ValueError: as `scan`.
    """
    offsets: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    for batch in batches(records, span):
        starts, texts = zip(*batch, strict=True)
        try:
            documents = encoder(texts)
        except ValueError:
            _raise_for_text(records, batch, encoder)
            raise
        for start, document in zip(starts, documents, strict=True):
            if document:
                offsets.append(start)
                counts.append(len(document))
                lengths.extend(map(len, document))
    return Scanned(
        np.array(offsets, np.int64), np.array(lengths, np.int32), np.array(counts, np.int32)
    )


def batches(records: Records, span: tuple[int, int]) -> Iterator[list[tuple[int, str]]]:
    """Offsets and texts of the records that begin in a range of bytes, a bounded number at a time.

    Raises:
        ValueError: a record is malformed; names file and line.
    """
    batch: list[tuple[int, str]] = []
    characters = 0
    for start, text in records.read(*span):
        if isinstance(text, BadLine):
            raise ValueError(
                f"{located(records, start)}: {text.reason} ({text.detail}); {_wanted(records)}"
            )
        batch.append((start, text))
        characters += len(text)
        if len(batch) == _TEXTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _raise_for_text(
    records: Records, batch: Sequence[tuple[int, str]], encoder: TextEncoder
) -> None:
    """Finds the one text that cannot be tokenized; of none, the error was about all of them."""
    refused: list[tuple[int, ValueError]] = []
    for start, text in batch:
        try:
            encoder([text])
        except ValueError as error:
            refused.append((start, error))
    if len(refused) < len(batch) or len(batch) == 1:
        start, first = refused[0]
        raise ValueError(f"{located(records, start)}: a text that cannot be tokenized ({first})")


def located(records: Records, offset: int) -> str:
    """File and line (from 1) of a record, for a message."""
    lines, left = 1, offset
    with open(records.file.path, "rb") as file:
        while left and (block := file.read(min(left, 1 << 24))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{records.file.path}, line {lines}"


def _wanted(records: Records) -> str:
    if records.file.has_columns:
        return "a row must have the column that --text-key names"
    with open(records.file.path, "rb") as file:
        if file.read(_SHOWN_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return (
                "the file is one JSON array: write it as JSON lines (jq -c '.[]'), or make a "
                ".bin/.idx of it with tools/preprocess_data.py"
            )
    return (
        "a line must be a JSON object with a string under the key that --text-key names "
        "(tools/preprocess_data.py --on-bad-line skip leaves such lines out)"
    )


def say_what_changed(folder: Path | None, depends_on: dict[str, Any], name: str) -> None:
    """Warns when the cache holds an index of the same files as they were before."""
    if folder is None or not folder.is_dir():
        return

    depends_on = json.loads(json.dumps(depends_on))  # tuples become lists, as they did there

    def without_state(description: dict[str, Any]) -> dict[str, Any]:
        names = [file[0] for file in description.get("files", [])]
        return {**description, "files": names}

    for path in folder.glob(f"{name}-*/description.json"):
        try:
            before = json.loads(path.read_text())["depends_on"]
            same = without_state(before) == without_state(depends_on)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            continue
        if same:
            old = {file[0]: file for file in before["files"]}
            named = [file[0] for file in depends_on["files"] if old[file[0]] != file]
            logger.warning(
                "%s changed since its documents were last indexed: a run that goes on with it now "
                "sees other samples than it would have seen",
                ", ".join(named),
            )
            return
