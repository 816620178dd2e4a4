"""The single pass over text files that finds their documents and counts their tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.json_lines import BYTE_ORDER_MARK, BadLine, lines_in
from megatron.data.text_encoder import TextEncoder, refused
from megatron.features.raw_text.text_files import TextRecords
from megatron.util.json_text import parse_json
from megatron.util.processes import map_in_order, usable_processors
from megatron.util.progress import progress_bar

logger = logging.getLogger(__name__)

_WORTH_PROCESSES = 1 << 25
"""Bytes of text from which starting processes, each with its tokenizer, pays."""
_TEXTS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 20
_SHOWN_BYTES = 60


Range = tuple[TextRecords, tuple[int, int]]
Scanned = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The d documents of a range, those without a token left out: where their records begin in the
file, int64[d]; tokens in each of n sequences, int32[n]; sequences per document, int32[d]."""


def scan(
    records: Sequence[TextRecords], encoder: TextEncoder, workers: int | None = None
) -> dict[str, np.ndarray]:
    """Reads all records and counts the tokens of their documents, by default in one process for
    each processor for 32 MiB of text or more.

    Returns record_offsets, int64[documents]: where each record begins, in the files back to back;
    sequence_lengths, int32[sequences]; document_indices, int64[documents + 1]. Raises ValueError if
    a record is malformed or cannot be tokenized; ChildProcessError if a process died.
    """
    *bases, size = accumulate((r.file.size for r in records), initial=0)
    ranges = [
        (r, base, span) for r, base in zip(records, bases, strict=True) for span in r.ranges()
    ]
    if workers is None:
        workers = usable_processors() if size >= _WORTH_PROCESSES else 1
    workers = min(workers, len(ranges))
    tasks = ((r, span) for r, _, span in ranges)
    offsets, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    counts = [np.zeros(1, np.int64)]
    try:
        scans = map_in_order(tasks, partial(_scanner, encoder), workers if workers > 1 else 0)
        with progress_bar("counting tokens", total=size) as bar:
            for (_, base, (start, stop)), (_, found) in zip(ranges, scans, strict=True):
                offsets.append(found[0] + base)
                lengths.append(found[1])
                counts.append(found[2])
                bar.update(stop - start)
    except ChildProcessError as error:
        raise ChildProcessError(f"counting tokens: {error}") from error
    return {
        "record_offsets": np.concatenate(offsets),
        "sequence_lengths": np.concatenate(lengths),
        "document_indices": np.cumsum(np.concatenate(counts), dtype=np.int64),
    }


def _scanner(encoder: TextEncoder) -> Callable[[Range], Scanned]:
    return lambda task: _scan_range(*task, encoder)


def _scan_range(records: TextRecords, span: tuple[int, int], encoder: TextEncoder) -> Scanned:
    offsets: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    for batch in batches(records, span):
        starts, texts = zip(*batch, strict=True)
        try:
            documents = encoder(texts)
        except ValueError:
            bad = dict(refused(encoder, texts))
            if len(bad) < len(texts) or len(texts) == 1:  # else it is about all of them
                place, error = next(iter(bad.items()))
                where = located(records, starts[place])
                raise ValueError(f"{where}: a text that cannot be tokenized ({error})") from None
            raise
        for start, document in zip(starts, documents, strict=True):
            if document:
                offsets.append(start)
                counts.append(len(document))
                lengths.extend(map(len, document))
    return np.array(offsets, np.int64), np.array(lengths, np.int32), np.array(counts, np.int32)


def batches(records: TextRecords, span: tuple[int, int]) -> Iterator[list[tuple[int, str]]]:
    """Offsets and texts of the records that begin in a range of bytes, a bounded number at a time.
    Raises ValueError if a record is malformed."""
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


def located(records: TextRecords, offset: int) -> str:
    """File and line (from 1) of a record, for a message."""
    return f"{records.file.path}, line {1 + lines_in(records.file.path, offset)}"


def _wanted(records: TextRecords) -> str:
    if records.file.has_columns:
        return "a row must have the column that --text-key names"
    with open(records.file.path, "rb") as file:
        if file.read(_SHOWN_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            return (
                "the file is one JSON array: write it as JSON lines (jq -c '.[]'), or make a "
                ".bin/.idx of it with tools/preprocess_data.py"
            )
    return (
        "a line must be a JSON object with a string under the key that --text-key names "
        "(tools/preprocess_data.py --on-bad-line skip leaves such lines out)"
    )


def say_what_changed(folder: Path | None, depends_on: dict[str, Any], name: str) -> None:
    """Warns when the cache contains an index of an earlier version of the same files."""
    now = json.loads(json.dumps(depends_on))  # tuples become lists, as in the file
    files = {file[0]: file for file in now.pop("files")}
    for path in folder.glob(f"{name}-*/description.json") if folder is not None else ():
        try:
            before = parse_json(path.read_bytes(), str(path), lenient=True)["depends_on"]
            old = {file[0]: file for file in before.pop("files")}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        if before == now and old.keys() == files.keys():
            named = ", ".join(name for name in files if old[name] != files[name])
            logger.warning(
                f"{named} changed since its documents were last indexed: a run that continues with "
                "it now sees different samples than it would have seen"
            )
            return
