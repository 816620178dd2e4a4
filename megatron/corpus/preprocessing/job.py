"""The working folder of a job: tokens written so far, and a journal that says how far that is.

    description.json   what the output depends on
    journal.json       place in the input and counts; replaced as a whole now and then
    lock               held by the process that works there
    N-KEY.bin          tokens of the key, the .bin to be
    N-KEY.lengths      int32, tokens in each sequence
    N-KEY.documents    int32, sequences in each document
    N-KEY.idx          made of the two at the end

The journal describes what was on the disk before it. What the files hold beyond it, after a kill,
is cut off when the job goes on.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.corpus.preprocessing.description import Description, difference, identity
from megatron.corpus.preprocessing.encode import BlockCounts
from megatron.corpus.preprocessing.index import write_index
from megatron.corpus.preprocessing.summary import KeySummary
from megatron.data.indexed import dataset_writer
from megatron.util.files import sync, sync_path, write_whole
from megatron.util.locks import Lock, LockTakenError

_JOURNAL, _DESCRIPTION, _LOCK = "journal.json", "description.json", "lock"


@dataclass
class Progressed:
    """How far a job is."""

    keys: list[KeySummary]
    source: int = 0
    cursor: int = 0
    """Where in that source it is read on."""
    records: int = 0
    """Of that source, before the cursor."""
    bytes_read: int = 0
    """Of all sources on disk."""
    bad_lines: dict[str, int] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def documents(self) -> int:
        """Of the key that has most."""
        return max(key.documents for key in self.keys)


class Job:
    """A working folder that is this process's own; `close` gives it back."""

    def __init__(self, folder: Path, keys: Sequence[str], dtype: np.dtype) -> None:
        """Takes the folder.

        Raises:
            OSError: it cannot be made.
            ValueError: another process works there.
        """
        self.folder, self.dtype = folder, np.dtype(dtype)
        self.prefixes = key_prefixes(folder, keys)
        self._appended: list[tuple[BinaryIO, BinaryIO]] = []
        self.has_journal = False
        self.restarted: str | None = None
        """Why what was there is not gone on with."""
        self._lock = lock_folder(folder)

    @property
    def token_paths(self) -> list[Path]:
        """The .bin of each key."""
        return [_with_ending(prefix, ".bin") for prefix in self.prefixes]

    @property
    def token_offsets(self) -> list[int]:
        """Bytes of each of them that are done."""
        return [key.tokens * self.dtype.itemsize for key in self.state.keys]

    def open(self, description: Description) -> None:
        """Goes on where the folder's journal ends, or starts anew."""
        self._digest = identity(description)
        self.state = self._found(description) or self._begun(description)
        if self.state.is_complete:
            return
        for prefix, key, offset in zip(
            self.prefixes, self.state.keys, self.token_offsets, strict=True
        ):
            _cut_off(_with_ending(prefix, ".bin"), offset)
            _cut_off(_with_ending(prefix, ".lengths"), 4 * key.sequences)
            _cut_off(_with_ending(prefix, ".documents"), 4 * key.documents)
            lengths, documents = (
                open(_with_ending(prefix, ending), "ab")  # noqa: SIM115 (closed by close)
                for ending in (".lengths", ".documents")
            )
            self._appended.append((lengths, documents))

    def add(self, counts: BlockCounts) -> None:
        """Takes note of a block whose tokens are written."""
        for number, part in enumerate(counts.documents):
            lengths, documents = self._appended[number]
            with self._naming():
                lengths.write(part.sequence_lengths.astype("<i4").data)
                documents.write(part.sequences_per_document.astype("<i4").data)
            self.state.keys[number] = self.state.keys[number].plus(part)

    def save(self) -> None:
        """Makes what is done last, whatever happens to this process or the machine."""
        with self._naming():
            for path, files in zip(self.token_paths, self._appended, strict=True):
                for file in files:
                    sync(file)
                sync_path(path)
            journal = {"description": self._digest, **dataclasses.asdict(self.state)}
            write_whole(self.folder / _JOURNAL, json.dumps(journal, indent=1).encode())
        self.has_journal = True

    def finish(self) -> None:
        """Makes the index of each key; the folder then holds complete .bin and .idx files."""
        self.save()
        for prefix, key in zip(self.prefixes, self.state.keys, strict=True):
            write_index(prefix, self.dtype, key.sequences, key.documents)
        self.state.is_complete = True
        self.save()

    def close(self) -> None:
        """Lets go of the folder."""
        for files in self._appended:
            for file in files:
                with suppress(OSError):  # a full disk, which has been reported
                    file.close()
        self._appended = []
        self._lock.release()

    def remove(self) -> None:
        """Ends the job and removes the folder."""
        self.close()
        remove_folder(self.folder)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """A failed write (full disk) does not know its file: name the folder."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.folder)) from error

    def _found(self, description: Description) -> Progressed | None:
        journal = _read_json(self.folder / _JOURNAL)
        if journal is None:
            return None
        if journal.pop("description", None) != self._digest:
            old = _read_json(self.folder / _DESCRIPTION) or {}
            self.restarted = difference(old, description)
            return None
        state = Progressed(**journal)
        state.keys = [KeySummary(**key) for key in journal["keys"]]
        if not state.is_complete and not self._holds(state):
            self.restarted = "its files are shorter than its journal says"
            return None
        self.has_journal = True
        return state

    def _holds(self, state: Progressed) -> bool:
        for prefix, key in zip(self.prefixes, state.keys, strict=True):
            for ending, size in (
                (".bin", key.tokens * self.dtype.itemsize),
                (".lengths", 4 * key.sequences),
                (".documents", 4 * key.documents),
            ):
                path = _with_ending(prefix, ending)
                if not path.exists() or path.stat().st_size < size:
                    return False
        return True

    def _begun(self, description: Description) -> Progressed:
        for path in self.folder.iterdir():
            # New files, not old ones emptied: a worker of a killed run may still write to those.
            if path.name != _LOCK:
                path.unlink()
        write_whole(self.folder / _DESCRIPTION, json.dumps(description, indent=1).encode())
        for prefix in self.prefixes:
            for ending in (".bin", ".lengths", ".documents"):
                _with_ending(prefix, ending).touch()
        return Progressed([KeySummary(str(prefix)) for prefix in self.prefixes])


def key_prefixes(folder: Path, keys: Sequence[str]) -> list[Path]:
    """The prefix of the files of each key in a working folder."""
    return [
        folder / f"{number}-{re.sub('[^0-9A-Za-z_.-]', '_', key)}"
        for number, key in enumerate(keys)
    ]


def publish(ours: Sequence[Path], finals: Sequence[str]) -> None:
    """Gives complete files their final names, for each key the tokens before the index."""
    for prefix, final in zip(ours, finals, strict=True):
        dataset_writer.publish(_with_ending(prefix, ".bin"), _with_ending(prefix, ".idx"), final)


def lock_folder(folder: Path) -> Lock:
    """Makes a folder this process's own, until the result is released or the process ends.

    Raises:
        ValueError: it is another process's.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return Lock(folder / _LOCK)
    except LockTakenError as error:
        raise ValueError(
            f"another process is at work in {folder}; wait for its end, or give another "
            "--output-prefix"
        ) from error


def remove_folder(folder: Path) -> None:
    """Removes a folder and, when it was the last one there, the one above it."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def _with_ending(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def _cut_off(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
