"""An index of a file of metrics: its rows by kind, in columns that are read without the file.

It is kept in a folder next to the file, ``.NAME.index``, or in the user's cache where that is not
writable or full. Rows appended to the file are added; a file that was replaced is read again, and
one that was copied with its index is not. A folder with links in it, which another user may have
made, is left alone.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from megatron.apps.dashboard.tables import LONGEST_NAME, MOST_COLUMNS, MetricTable, MetricTableState
from megatron.util.digests import digest, digest_of_parts
from megatron.util.files import (
    Lock,
    LockTakenError,
    open_regular,
    read_regular,
    remove_partial,
    replacing,
)

FORMAT = 3
MOST_KINDS = 500
MOST_SERIES = 4000  # columns of all kinds together
MOST_TEXTS = 2000
_MOST_TEXT_BYTES = 1 << 23
_LONGEST_TEXT = 20_000
_LONGEST_ROW = 1 << 20
_LEAST_ROW = len(b'{"kind":"","iteration":0}\n')
_MOST_MANIFEST, _MANIFEST_ROOM = 1 << 25, 1 << 20
"""Bytes of a manifest, and by how many it may exceed the metrics file."""
_BLOCK_BYTES = 512
_CHUNK_BYTES = 1 << 22
_KNOWN_BYTES = 1 << 16
_TEXTS = ("prompt", "answer", "reference")
_MOST_STEPS = 1 << 53
_MANIFEST, _LOCK = "index.json", "lock"
_OWN = re.compile(r"lock|index\.json(\.partial-[0-9a-f]+)?|\d+-\d+\.f64")


class _UnwritableError(OSError):
    """No more can be written where the index is."""


class RunIndex:
    """The rows of the file ``path``. Used by one thread at a time. Raises OSError if the file
    cannot be read, or no place takes its index.

    Attributes:
        tables: by kind, in the order in which kinds appeared.
        texts: the last rows of the kind ``text``.
        broken: lines that are not rows, which are passed over.
        left_out: rows of further kinds than there is room for.
        lines: read so far.
        generation: grows whenever the file was read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        with open_regular(path):
            pass  # so that a file without rights is named before anything else
        self._open(_places(path))

    def _open(self, places: list[Path]) -> None:
        """Use the first of the folders that can be written, or one of this process alone."""
        self._places = places
        self._folder, self._lock = _open_folder(places)
        self.clear()
        if not self._restore():
            self._begin()

    def clear(self) -> None:
        self.tables: dict[str, MetricTable] = {}
        self.texts: list[dict[str, Any]] = []
        self.broken = self.lines = self.left_out = self.offset = self._last = 0
        self.old_texts = self._left_out_before = self._top = 0
        self._inside = False
        """True where the next bytes of the file are the rest of a line that is too long."""
        self._mark = ""

    def close(self) -> None:
        """Let another process continue the index."""
        if self._lock is not None:
            self._lock.release()
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def version(self) -> str:
        return f"{self.generation}-{self.offset}"

    def update(self, told: Callable[[float], None] = lambda share: None) -> Generator[None]:
        """Read new rows piece by piece; in between other threads may read tables. ``told`` receives
        the share of the file read so far. Where space runs out, as on a full disk, the index is
        rebuilt elsewhere. Raises OSError if the file cannot be read, or no place takes its
        index."""
        while True:
            try:
                yield from self._read(told)
                return
            except _UnwritableError as error:
                is_private = self._lock is None
                self._leave()
                if is_private:
                    self._open([])  # for the next time
                    raise OSError(error.errno, f"no room for its index: {error.strerror}") from None
                self._open(self._places)

    def _read(self, told: Callable[[float], None]) -> Generator[None]:
        with open_regular(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.offset or self._mark != _mark(file, self.offset):
                self._begin()
            if size == self.offset:
                return
            before = self.offset
            try:
                while lines := self._lines(file):
                    try:
                        self._take(lines)
                    except OSError as error:
                        before = self.offset  # half the piece is in the tables: nothing is saved
                        raise _UnwritableError(error.errno, error.strerror) from None
                    self.offset += sum(map(len, lines))
                    told(min(1.0, self.offset / max(1, size)))
                    yield
            finally:  # also if the rest is not read
                if self.offset != before:
                    self._mark = _mark(file, self.offset)
                    with suppress(OSError):  # an earlier one is as good: its tables are cut to it
                        self._save()

    def _lines(self, file: Any) -> list[bytes]:
        """Return the next lines, up to a bounded number of bytes. A line longer than any row comes
        in pieces, of which only the last has a line end."""
        file.seek(self.offset)
        chunk = file.read(_CHUNK_BYTES)
        if b"\n" not in chunk:
            chunk += file.read(_LONGEST_ROW)
        lines = io.BytesIO(chunk).readlines()
        if lines and not lines[-1].endswith(b"\n") and len(lines[-1]) <= _LONGEST_ROW:
            lines.pop()  # half a row, whose rest is still to be written
        return lines

    def _leave(self) -> None:
        """Give the place back where nothing more fits, with the room that the index took."""
        with suppress(OSError):
            self._begin()
        self.close()

    def _begin(self) -> None:
        self.generation += 1
        self.clear()
        for path in self._folder.iterdir():
            if path.name != _LOCK and _OWN.fullmatch(path.name):
                path.unlink()

    def _take(self, lines: list[bytes]) -> None:
        """Add rows. One that continues from an earlier step makes the steps after it void, as the
        writer of the file does when a run is resumed."""
        for line in lines:
            whole = line.endswith(b"\n")
            self.lines += whole
            if self._inside or not whole or len(line) > _LONGEST_ROW:
                self.broken += whole
                self._inside = not whole
                continue
            try:
                row = orjson.loads(line)
                kind, step = row["kind"], row["iteration"]
            except (ValueError, KeyError, TypeError, IndexError):
                self.broken += 1
                continue
            if type(kind) is not str or type(step) is not int or not 0 <= step < _MOST_STEPS:
                self.broken += 1
                continue
            if kind == "resume":
                self._void(step + 1)
            elif kind == "train":
                if step <= self._last:
                    self._void(step)
                self._last = step
            self._add(kind, row)
        room = MOST_SERIES - sum(len(table.columns) for table in self.tables.values())
        for table in self.tables.values():
            before = len(table.columns)
            table.flush(room)
            room -= len(table.columns) - before
        self.texts = self._newest_texts()

    def _add(self, kind: str, row: dict[str, Any]) -> None:
        if row["iteration"] > self._top:
            self._top = row["iteration"]
        if kind == "text":
            self.texts.append(_text(row))
            return
        table = self.tables.get(kind)
        if table is None:
            if len(self.tables) == MOST_KINDS or len(kind) > LONGEST_NAME:
                self.left_out += 1
                return
            number = len(self.tables)
            table = MetricTable(self._folder, number, MetricTableState(kind, 0, []))
            self.tables[kind] = table
        table.add(row)

    def _void(self, step: int) -> None:
        self._last = min(self._last, step - 1)
        if step > self._top:
            return
        self._top = step - 1
        for table in self.tables.values():
            table.cut_from(step)
        while self.texts and self.texts[-1]["iteration"] >= step:
            self.texts.pop()

    def _newest_texts(self) -> list[dict[str, Any]]:
        """Return the last texts, of bounded number and length."""
        room, kept = _MOST_TEXT_BYTES, 0
        for text in reversed(self.texts[-MOST_TEXTS:]):
            room -= sum(len(text[name]) for name in _TEXTS)
            if room < 0:
                break
            kept += 1
        self.old_texts += len(self.texts) - kept
        return self.texts[len(self.texts) - kept :]

    @property
    def _values_left_out(self) -> int:
        return self._left_out_before + sum(table.left_out for table in self.tables.values())

    @property
    def notes(self) -> list[str]:
        """A line for each part of the file that there was no room for."""
        values, notes = self._values_left_out, []
        if self.left_out:
            notes.append(
                f"{self.left_out:,} rows are left out, of kinds beyond the first {MOST_KINDS} or "
                f"with names of more than {LONGEST_NAME} characters"
            )
        if values:
            notes.append(
                f"{values:,} values are left out, of names beyond the first {MOST_COLUMNS} of a "
                f"kind or {MOST_SERIES:,} of all, or of more than {LONGEST_NAME} characters"
            )
        if self.old_texts:
            notes.append(f"{self.old_texts:,} older texts are left out")
        return notes

    def _save(self) -> None:
        content = {
            "format": FORMAT,
            "mark": self._mark,
            "offset": self.offset,
            "lines": self.lines,
            "broken": self.broken,
            "last": self._last,
            "inside": self._inside,
            "left_out": [self.left_out, self._values_left_out, self.old_texts],
            "tables": [list(table.state) for table in self.tables.values()],
            "texts": self.texts,
        }
        with replacing(self._folder / _MANIFEST) as part:
            part.write_bytes(orjson.dumps(content))

    def _restore(self) -> bool:
        """Open the index of an earlier process; False if it is not one of this file. It may be
        another user's: numbers that the file cannot have are refused, so that it costs no more than
        the file."""
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                size = status.st_size
                most = min(_MOST_MANIFEST, size + _MANIFEST_ROOM)
                content = orjson.loads(read_regular(self._folder / _MANIFEST, most))
                if content["format"] != FORMAT:
                    return False
                offset = _count(content["offset"], size)
                if content["mark"] != _mark(file, offset):
                    return False
            states = [_table_state(*state) for state in content["tables"]]
            columns = sum(len(state.columns) for state in states)
            if len(states) > len({state.kind for state in states}) or len(states) > MOST_KINDS:
                return False
            if columns > MOST_SERIES + MOST_KINDS or len(content["texts"]) > MOST_TEXTS:
                return False
            lines = _count(content["lines"], offset)
            # No rows are in the holes of a sparse file.
            stored = min(offset, (status.st_blocks + 1) * _BLOCK_BYTES)
            _count(sum(state.rows for state in states), stored // _LEAST_ROW)
            for number, state in enumerate(states):
                self.tables[state.kind] = MetricTable(self._folder, number, state)
            self.texts = [_text(row) for row in content["texts"]]
            left_out = (_count(number, _MOST_STEPS) for number in content["left_out"])
            self.left_out, self._left_out_before, self.old_texts = left_out
            self.offset, self.lines, self._mark = offset, lines, content["mark"]
            self.broken, self._last = _count(content["broken"], lines), _count(content["last"])
            self._inside, self._top = bool(content["inside"]), _MOST_STEPS
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            return False
        return True


def _count(value: Any, most: int = _MOST_STEPS) -> int:
    """Return a count in an index. Raises ValueError if it cannot be right."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value} of an index")
    return value


def _table_state(kind: Any, rows: Any, columns: Any) -> MetricTableState:
    names = [kind, *columns]
    if not all(type(name) is str and len(name) <= LONGEST_NAME for name in names):
        raise ValueError("names of an index")
    if len(set(columns)) < len(columns) or len(columns) > MOST_COLUMNS:
        raise ValueError("columns of an index")
    if rows and "iteration" not in columns:
        raise ValueError("a table without steps")
    return MetricTableState(kind, _count(rows), columns)


def _text(row: dict[str, Any]) -> dict[str, Any]:
    words = {name: str(row.get(name) or "") for name in _TEXTS}
    for name, text in words.items():
        if len(text) > _LONGEST_TEXT:
            words[name] = f"{text[: _LONGEST_TEXT - 4]} […]"
    return {"iteration": _count(row["iteration"]), **words, "ended": bool(row.get("ended", True))}


def _mark(file: Any, offset: int) -> str:
    """Return a digest of the beginning and the end of what was read of a file."""
    if not offset:
        return ""
    parts = []
    for start in (0, max(0, offset - _KNOWN_BYTES)):
        file.seek(start)
        parts.append(file.read(min(_KNOWN_BYTES, offset)))
    return digest_of_parts(parts)


def _places(path: Path) -> list[Path]:
    """Return the folders where the index of a file may be kept."""
    path = path.resolve()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-dashboard"
    return [path.with_name(f".{path.name}.index"), cache / digest(os.fsencode(path))]


def _open_folder(places: list[Path]) -> tuple[Path, Lock | None]:
    """The first of the folders that can be written, which is taken from the list, and the lock on
    it; a folder of this process alone, without a lock, where another one has locked it or no place
    is left."""
    while places:
        folder = places.pop(0)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not _is_index(folder):
                continue
            lock = Lock(folder / _LOCK)
        except LockTakenError:
            break
        except OSError:
            continue
        remove_partial(folder)
        return folder, lock
    return Path(tempfile.mkdtemp(prefix="megatron-dashboard-")), None


def _is_index(folder: Path) -> bool:
    """Return True if a folder has files of an index and nothing else. Runs are passed on in
    folders, in which one with a link would lead to files that are not to be changed."""
    if folder.is_symlink():
        return False
    with os.scandir(folder) as entries:
        return all(
            _OWN.fullmatch(entry.name)
            and entry.is_file(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_nlink == 1
            for entry in entries
        )
