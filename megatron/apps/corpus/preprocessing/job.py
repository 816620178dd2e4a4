"""The work on one partition, in a separate folder, which can be resumed if the run is killed.

    description.json   everything that the output depends on
    journal.json       place in the input and counts; replaced as a whole periodically
    lock               held by the process that works there
    N-KEY.bin          tokens of the key, the final .bin
    N-KEY.lengths      int32, tokens in each sequence
    N-KEY.documents    int64, sequences before each document and after the last
    N-KEY.idx          made of the two at the end

The journal describes what had reached the disk before it. What the files contain beyond that, after
a kill, is cut off when the job continues.
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

from megatron.apps.corpus.preprocessing.inputs import Form, InputFile
from megatron.apps.corpus.preprocessing.readers import (
    BlockEncoder,
    EncodedBlock,
    EncodedTexts,
    FileRange,
    RecordBlock,
    read_blocks,
)
from megatron.data.indexed.dataset_writer import Spool, index_parts
from megatron.features.raw_text.records import BadLine, lines_in
from megatron.features.raw_text.workers import map_in_order
from megatron.util.digests import digest
from megatron.util.files import Lock, LockTakenError, naming, sync, write_whole

_SHOWN = 5


@dataclass
class BadLines:
    by_reason: dict[str, int] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)  # the first few, with file and line

    def add(self, name: str, unit: str, line: BadLine) -> None:
        self.merge(BadLines({line.reason: 1}, [located(name, unit, line)]))

    def merge(self, later: BadLines) -> None:
        """Add the counts of later input."""
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
    """Return where a malformed line is, and what is wrong with it, for messages."""
    return f"{name}, {unit} {line.number}: {line.reason} ({line.detail})"


@dataclass
class KeySummary:
    prefix: str  # of the .bin and .idx
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0  # UTF-8 bytes of the texts
    empty: int = 0  # texts without a token, left out

    def add(self, other: KeySummary | EncodedTexts) -> None:
        """Add the counts of a block or of a partition."""
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
    bad_lines: dict[str, int]  # lines left out, by reason
    seconds: float  # of this run, without an interrupted one before it
    parts_left: str | None = None
    """With --partition-rank: what remains to be done before there is an output."""


SECONDS_BETWEEN_SAVES = 10.0
_FORMAT = 2  # of the folder; a job does not continue another format's
_JOURNAL, _DESCRIPTION, _LOCK = "journal.json", "description.json", "lock"
_BUFFER_BYTES = 1 << 16

Description = dict[str, Any]


@dataclass
class JobState:
    keys: list[KeySummary]
    file: int = 0  # number of the input file
    cursor: int = 0  # where reading it continues
    lines: int = 0  # of plain lines: those of this partition before the cursor
    bytes_read: int = 0  # of all files, on disk
    bad_lines: BadLines = field(default_factory=BadLines)
    is_complete: bool = False


class PreprocessJob:
    """A partition's work; owns its folder until `close`."""

    def __init__(self, folder: Path, inputs: Sequence[InputFile], encoder: BlockEncoder) -> None:
        """Take the folder and continue where its journal ends, or start again; `notice` tells the
        user which. Raises OSError if the folder cannot be made or written to, ValueError if another
        process works there."""
        self.folder, self._inputs, self._encoder = folder, inputs, encoder
        self._config = encoder.config
        self._bytes_before = [0, *accumulate(file.bytes_to_read for file in inputs)]
        self._outputs: list[tuple[BinaryIO, Spool, Spool]] = []
        """Tokens, sequence lengths and document bounds of each key."""
        self.notice: str | None = None
        self.has_journal = False
        self._lock = lock_folder(folder)
        try:
            self._open(_describe(inputs, encoder))
        except BaseException:  # an interrupt too must release the lock
            self.close()
            raise

    @property
    def prefixes(self) -> list[Path]:
        return key_prefixes(self.folder, self._config.keys)

    def run(
        self, workers: int, report: Callable[[int, int, int], None], is_over: Callable[[], bool]
    ) -> None:
        """Read, encode and write the rest, in `workers` processes or, with 0, in this one.

        `report` is called with the documents, the bytes of text and the bytes on disk of a block.
        Raises ValueError for a malformed record that stops the run, or a damaged file; OSError if
        the output cannot be written; ChildProcessError if a worker died; InterruptedError if
        `is_over`, because another partition has failed.
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
            with suppress(OSError):  # a full disk, which has been reported
                file.close()
        self._outputs = []
        self._lock.release()

    def remove(self) -> None:
        """End the job and remove the folder, and the one above it when that is empty."""
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
        """Bring the work so far to the disk, for a crash of this process or of the machine."""
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
                file.truncate(size)  # which extends new bounds by the first, a zero

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
        """Return an interrupted run's work if it can be continued; report it with `notice`."""
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
    """Return the prefix of the files of each key in a job's folder."""
    return [
        folder / f"{number}-{re.sub('[^0-9A-Za-z_.-]', '_', key)}"
        for number, key in enumerate(keys)
    ]


def lock_folder(folder: Path) -> Lock:
    """Lock a folder until the result is released or the process ends. Raises ValueError if another
    process holds the lock, OSError if it cannot be created."""
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
    """Return the number of lines of a file before the ones that a partition reads."""
    return 1 + lines_in(file.path, file.start - 1) if file.path and file.start else 0


def _with_ending(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _describe(inputs: Sequence[InputFile], encoder: BlockEncoder) -> Description:
    """Return everything that the output depends on by the name of its flag: the settings, and the
    size and time of every file that is read."""
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
    return json.loads(json.dumps(described))  # tuples become lists, as when read back


def _with_files(value: Any) -> Any:
    """Return a path with the sizes and times of the files there."""
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
