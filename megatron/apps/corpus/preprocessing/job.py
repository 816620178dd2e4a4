"""Preprocessing of one partition. It has a separate folder, and can be resumed after it was killed.

    description.json   everything that the output depends on
    journal.json       position in the input and counts; replaced as a whole periodically
    lock               locked by the process that works in the folder
    N-KEY.bin          tokens of the key, the final .bin
    N-KEY.lengths      int32, tokens in each sequence
    N-KEY.documents    int64, sequences before each document and after the last
    N-KEY.idx          made from the two files above at the end

The journal only describes data that reached the disk before the journal did. After a kill, the
files may contain more. The excess is truncated when the job is resumed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from megatron.apps.corpus.indexed_writer import Spool, index_parts
from megatron.apps.corpus.preprocessing.inputs import Form, InputFile
from megatron.apps.corpus.preprocessing.readers import (
    BlockEncoder,
    EncodedBlock,
    EncodedTexts,
    FileRange,
    RecordBlock,
    read_blocks,
)
from megatron.features.raw_text.records import BadLine, lines_in
from megatron.util.digests import digest
from megatron.util.files import Lock, LockTakenError, naming, sync, write_whole
from megatron.util.workers import map_in_order

_SHOWN = 5


@dataclass
class BadLines:
    by_reason: dict[str, int] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)  # the first few lines, with file and location

    def add(self, name: str, unit: str, line: BadLine) -> None:
        self.merge(BadLines({line.reason: 1}, [located(name, unit, line)]))

    def merge(self, later: BadLines) -> None:
        """Add the counts of ``later``, which belongs to later input."""
        for reason, count in later.by_reason.items():
            self.by_reason[reason] = self.by_reason.get(reason, 0) + count
        self.shown = [*self.shown, *later.shown][:_SHOWN]

    def __str__(self) -> str:
        total = sum(self.by_reason.values())
        reasons = ", ".join(f"{count:,} x {reason}" for reason, count in self.by_reason.items())
        lines = [f"{total:,} malformed lines left out: {reasons}"]
        lines += [f"  {shown}" for shown in self.shown]
        if total > len(self.shown):
            lines.append(f"  and {total - len(self.shown):,} more")
        return "\n".join(lines)


def located(name: str, unit: str, line: BadLine) -> str:
    """Return a message with a malformed line's location and the reason."""
    return f"{name}, {unit} {line.number}: {line.reason} ({line.detail})"


@dataclass
class KeySummary:
    prefix: str  # prefix of the .bin and .idx
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0  # number of UTF-8 bytes of the texts
    empty: int = 0  # number of texts without tokens, which are left out

    def add(self, other: KeySummary | EncodedTexts) -> None:
        """Add the counts of a block or of another partition."""
        if isinstance(other, EncodedTexts):
            lengths, documents = other.sequence_lengths, other.sequences_per_document
            sizes = (len(documents), len(lengths), len(other.tokens))
            other = KeySummary("", *sizes, other.text_bytes, other.empty)
        self.documents += other.documents
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.empty += other.empty


@dataclass(frozen=True)
class PreprocessSummary:
    keys: dict[str, KeySummary]
    bad_lines: dict[str, int]  # number of skipped lines, by reason
    seconds: float  # duration, without earlier interrupted runs
    parts_left: str | None = None
    """With --partition-rank: message about the partitions that must still be done."""


SECONDS_BETWEEN_SAVES = 10.0
_FORMAT = 2  # version of the folder's layout; folders of other versions are not resumed
_JOURNAL, _DESCRIPTION, _LOCK = "journal.json", "description.json", "lock"
_BUFFER_BYTES = 1 << 16

Description = dict[str, Any]


@dataclass
class JobState:
    keys: list[KeySummary]
    file: int = 0  # index of the input file
    cursor: int = 0  # position in this file from which to resume
    lines: int = 0  # number of this partition's plain lines before the cursor
    bytes_read: int = 0  # number of bytes read from disk, over all files
    bad_lines: BadLines = field(default_factory=BadLines)
    is_complete: bool = False


class PreprocessJob:
    """Preprocessing of one partition. It has exclusive use of its folder until `close`."""

    def __init__(self, folder: Path, inputs: Sequence[InputFile], encoder: BlockEncoder) -> None:
        """Lock the folder, and resume from its journal or start over. Sets `notice` to a message
        for the user if there was an interrupted run. Raises OSError if the folder cannot be created
        or written to, and ValueError if another process works in it."""
        self.folder, self._inputs, self._encoder = folder, inputs, encoder
        self._config = encoder.config
        self._bytes_before = [0, *accumulate(file.bytes_to_read for file in inputs)]
        self._outputs: list[tuple[BinaryIO, Spool, Spool]] = []
        """Files for tokens, sequence lengths and document bounds, for each key."""
        self.notice: str | None = None
        self.has_journal = False
        self._lock = lock_folder(folder)
        try:
            self._open(_describe(inputs, encoder))
        except BaseException:  # including an interrupt, which must release the lock
            self.close()
            raise

    @property
    def prefixes(self) -> list[Path]:
        return key_prefixes(self.folder, self._config.keys)

    def run(
        self, workers: int, report: Callable[[int, int, int], None], is_over: Callable[[], bool]
    ) -> None:
        """Read, encode and write the remaining input, in `workers` processes, or in this process if
        0.

        For each block, `report` is called with the number of documents, bytes of text and bytes
        read from disk. Raises ValueError if a file is damaged or a malformed record stops the run,
        OSError if the output cannot be written, ChildProcessError if a worker died, and
        InterruptedError if `is_over` returns true because another partition has failed.
        """
        state, config, saved = self.state, self._config, time.monotonic()
        if state.is_complete:
            return
        can_resume = all(file.path is not None for file in self._inputs)
        blocks = read_blocks(
            self._inputs, config.keys, config.max_line_bytes, state.file, state.cursor
        )
        prepare = partial(BlockEncoder, config) if workers else lambda: self._encoder
        with closing(map_in_order(blocks, prepare, workers)) as encoded_blocks:
            for block, encoded in encoded_blocks:
                if is_over():
                    raise InterruptedError("another partition has failed")
                self._add(block, encoded, report)
                if can_resume and time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
                    self._save()
                    saved = time.monotonic()
        self._save()
        for prefix, (_, lengths, bounds) in zip(self.prefixes, self._outputs, strict=True):
            path = _with_ending(prefix, ".idx")
            with naming(path), path.open("wb") as file:
                dtype = self._encoder.dtype.newbyteorder("<")
                file.writelines(index_parts(dtype, lengths, bounds))
                sync(file)
        state.is_complete = True
        self._save()

    def close(self) -> None:
        for file in self._files():
            with suppress(OSError):  # a full disk has already been reported
                file.close()
        self._outputs = []
        self._lock.release()

    def remove(self) -> None:
        """Close the job and remove its folder, and the parent folder if it is then empty."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()

    def _add(
        self, block: RecordBlock, encoded: EncodedBlock, report: Callable[[int, int, int], None]
    ) -> None:
        state = self.state
        if block.number != state.file:
            state.file, state.lines = block.number, 0
        if encoded.bad_lines:
            self._add_bad_lines(block, encoded)
        for texts, outputs, summary in zip(encoded.texts, self._outputs, state.keys, strict=True):
            tokens, lengths, bounds = outputs
            with naming(tokens.name):
                tokens.write(texts.tokens.data)
            bounds.append(lengths.count + np.cumsum(texts.sequences_per_document, dtype=np.int64))
            lengths.append(texts.sequence_lengths)
            summary.add(texts)
        state.cursor, state.lines = block.cursor, state.lines + encoded.lines
        before = state.bytes_read
        state.bytes_read = self._bytes_before[block.number] + block.bytes_read
        report(
            max(len(texts.sequences_per_document) for texts in encoded.texts),
            sum(texts.text_bytes for texts in encoded.texts),
            state.bytes_read - before,
        )

    def _add_bad_lines(self, block: RecordBlock, encoded: EncodedBlock) -> None:
        unit = block.file.form.value if block.file.form in (Form.ARRAY, Form.PARQUET) else "line"
        before = 0
        if isinstance(block.records, FileRange):
            before = _lines_before(block.file) + self.state.lines
        for line in encoded.bad_lines:
            line = dataclasses.replace(line, number=line.number + before)
            if self._config.stop_at_bad_line:
                raise ValueError(
                    f"--input {located(block.file.name, unit, line)}; a line must be a JSON object "
                    "with the strings of --json-keys (--on-bad-line skip leaves such lines out)"
                )
            self.state.bad_lines.add(block.file.name, unit, line)

    def _save(self) -> None:
        """Sync the work so far to disk, so that it survives a crash of process or machine."""
        for file in self._files():
            with naming(file.name):
                sync(file)
        journal = {"description": self._digest, **dataclasses.asdict(self.state)}
        write_whole(self.folder / _JOURNAL, json.dumps(journal, indent=1).encode())
        self.has_journal = True

    def _open(self, description: Description) -> None:
        self._digest = digest(json.dumps(description, sort_keys=True))
        state = self._found(description)
        if state is None:
            for path in self.folder.iterdir():
                if path.name != _LOCK:
                    path.unlink()
            content = json.dumps(description, indent=1).encode()
            write_whole(self.folder / _DESCRIPTION, content)
        self.state = state or JobState([KeySummary(str(prefix)) for prefix in self.prefixes])
        if self.state.is_complete:
            return
        for key, sizes in zip(self.state.keys, self._sizes(self.state), strict=True):
            tokens, lengths, bounds = (path.open("a+b", _BUFFER_BYTES) for path in sizes)
            _, of_lengths, of_bounds = sizes
            spools = (
                Spool(lengths, "<i4", of_lengths, key.sequences),
                Spool(bounds, "<i8", of_bounds, key.documents + 1),
            )
            self._outputs.append((tokens, *spools))
            for file, size in zip((tokens, lengths, bounds), sizes.values(), strict=True):
                file.truncate(size)  # also writes the initial 0 of a new bounds file

    def _files(self) -> list[IO[bytes]]:
        return [
            file
            for tokens, *spools in self._outputs
            for file in (tokens, *(s.file for s in spools))
        ]

    def _sizes(self, state: JobState) -> Iterator[dict[Path, int]]:
        for prefix, key in zip(self.prefixes, state.keys, strict=True):
            yield {
                _with_ending(prefix, ".bin"): key.tokens * self._encoder.dtype.itemsize,
                _with_ending(prefix, ".lengths"): 4 * key.sequences,
                _with_ending(prefix, ".documents"): 8 * (key.documents + 1),
            }

    def _found(self, description: Description) -> JobState | None:
        """Return an interrupted run's state, or None if it cannot be resumed. Sets `notice`."""
        journal = _read_json(self.folder / _JOURNAL)
        if journal is None:
            return None
        reason = None
        if journal.pop("description", None) != self._digest:
            reason = _difference(_read_json(self.folder / _DESCRIPTION) or {}, description)
        else:
            state = JobState(**journal)
            state.keys = [KeySummary(**key) for key in journal["keys"]]
            state.bad_lines = BadLines(**journal["bad_lines"])
            sizes = [item for of_key in self._sizes(state) for item in of_key.items()]
            if not state.is_complete and not all(
                path.exists() and path.stat().st_size >= size for path, size in sizes
            ):
                reason = "its files are shorter than its journal says"
        if reason is not None:
            self.notice = f"the work of an interrupted run there is discarded: {reason}"
            return None
        self.has_journal = True
        documents = max(key.documents for key in state.keys)
        self.notice = (
            f"an interrupted run did all of it: {documents:,} documents"
            if state.is_complete
            else f"continues after the {documents:,} documents, from {state.bytes_read / 1e6:,.1f} "
            "MB of input, of an interrupted run"
        )
        return state


def key_prefixes(folder: Path, keys: Sequence[str]) -> list[Path]:
    """Return the prefix of each key's files in the folder of a partition."""
    return [
        folder / f"{number}-{re.sub('[^0-9A-Za-z_.-]', '_', key)}"
        for number, key in enumerate(keys)
    ]


def lock_folder(folder: Path) -> Lock:
    """Lock a folder until the returned lock is released or the process ends. Raises ValueError if
    another process holds the lock, and OSError if the folder cannot be created."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return Lock(folder / _LOCK)
    except LockTakenError as error:
        raise ValueError(
            f"another process is at work in {folder}; wait until it ends, or give another "
            "--output-prefix"
        ) from error


@lru_cache(maxsize=1)
def _lines_before(file: InputFile) -> int:
    """Return the number of lines in a file before the lines that a partition reads."""
    return 1 + lines_in(file.path, file.start - 1) if file.path and file.start else 0


def _with_ending(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _describe(inputs: Sequence[InputFile], encoder: BlockEncoder) -> Description:
    """Return everything that the output depends on: the settings, by flag, and the size and
    modification time of every file that is read."""
    settings = dataclasses.asdict(encoder.config)
    text = settings.pop("text")
    tokenizer = {name: _with_files(value) for name, value in text.pop("tokenizer").items()}
    names = {
        "keys": "json_keys",
        "splitter": "sentence_splitter",
        "stop_at_bad_line": "on_bad_line",
    }
    described: Description = {
        "--" + names.get(name, name).replace("_", "-"): value
        for name, value in {**settings, **text, **tokenizer}.items()
    }
    described["--input"] = [
        [file.name, file.form.name, file.size, file.mtime_ns, file.start, file.stop]
        for file in inputs
    ]
    described["format of the folder"] = _FORMAT
    return json.loads(json.dumps(described))  # tuples become lists, as in the stored JSON


def _with_files(value: Any) -> Any:
    """Return a path with its files' sizes and modification times; other values unchanged."""
    if not isinstance(value, str) or not Path(value).exists():
        return value
    path = Path(value)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    statuses = [(str(file), os.stat(file)) for file in files if file.is_file()]
    return [value, [[name, status.st_size, status.st_mtime_ns] for name, status in statuses]]


def _difference(old: Description, new: Description) -> str:
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if name != "--input":
            return f"{name} was {json.dumps(before)} and is {json.dumps(now)}"
        then, now = ({entry[0]: entry for entry in files or []} for files in (before, now))
        for path in now:
            if path not in then:
                return f"--input {path} was not read"
            if then[path] != now[path]:
                return f"--input {path} has changed"
        for path in then:
            if path not in now:
                return f"--input {path} is no longer read"
        return "the order of --input has changed"
    return "nothing"
