"""Index of a metrics file: its rows by kind, in columns that can be read without the file.

The index is in a folder next to the file, ``.NAME.index``, or in the user's cache folder if the
former is not writable or full. Rows that are appended to the file are added. If the file was
replaced, it is read again; if it was copied together with its index, it is not. An index folder
that contains links, which another user may have made, is never used.
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
MOST_SERIES = 4000  # maximum number of columns in all tables together
MOST_TEXTS = 2000
_MOST_TEXT_BYTES = 1 << 23
_LONGEST_TEXT = 20_000
_LONGEST_ROW = 1 << 20
_LEAST_ROW = len(b'{"kind":"","iteration":0}\n')
_MOST_MANIFEST, _MANIFEST_ROOM = 1 << 25, 1 << 20
"""Maximum size of a manifest in bytes, and maximum by which it may exceed the metrics file."""
_BLOCK_BYTES = 512
_CHUNK_BYTES = 1 << 22
_KNOWN_BYTES = 1 << 16
_TEXTS = ("prompt", "answer", "reference")
_MOST_STEPS = 1 << 53
_MANIFEST, _LOCK = "index.json", "lock"
_OWN = re.compile(r"lock|index\.json(\.partial-[0-9a-f]+)?|\d+-\d+\.f64")


class _UnwritableError(OSError):
    """Raised if nothing more can be written to the folder of the index."""


class RunIndex:
    """Index of the rows in the metrics file ``path``. Not thread-safe. Raises OSError if the file
    cannot be read, or if no folder can store its index.

    Attributes:
        tables: tables by kind of row, in the order in which kinds appeared.
        texts: the last rows of the kind ``text``.
        broken: number of lines that are not valid rows, which are skipped.
        left_out: number of rows of kinds beyond the limit.
        lines: number of lines read so far.
        generation: counter that increases whenever the file is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        with open_regular(path):
            pass  # report an unreadable file before any other error
        self._open(_places(path))

    def _open(self, places: list[Path]) -> None:
        """Use the first of these folders that is writable, or else a temporary folder of this
        process."""
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
        """True if the next bytes of the file continue a line that is too long."""
        self._mark = ""

    def close(self) -> None:
        """Release the index, so that another process can use it."""
        if self._lock is not None:
            self._lock.release()
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def version(self) -> str:
        return f"{self.generation}-{self.offset}"

    def update(self, told: Callable[[float], None] = lambda share: None) -> Generator[None]:
        """Read new rows in pieces. Other threads may read tables between pieces. ``told`` is
        called with the fraction of the file read so far. If the disk is full, the index is
        rebuilt elsewhere. Raises OSError if the file cannot be read, or if no folder can store
        its index."""
        while True:
            try:
                yield from self._read(told)
                return
            except _UnwritableError as error:
                is_private = self._lock is None
                self._leave()
                if is_private:
                    self._open([])  # use a temporary index from the next update on
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
                        # Only part of the piece is in the tables, so do not save.
                        before = self.offset
                        raise _UnwritableError(error.errno, error.strerror) from None
                    self.offset += sum(map(len, lines))
                    told(min(1.0, self.offset / max(1, size)))
                    yield
            finally:  # even if the caller stops early
                if self.offset != before:
                    self._mark = _mark(file, self.offset)
                    # If saving fails, the previous manifest remains valid: tables are truncated to
                    # it.
                    with suppress(OSError):
                        self._save()

    def _lines(self, file: Any) -> list[bytes]:
        """Return the next lines, up to a bounded number of bytes. A line longer than any valid row
        is returned in pieces; only the last piece ends with a line feed."""
        file.seek(self.offset)
        chunk = file.read(_CHUNK_BYTES)
        if b"\n" not in chunk:
            chunk += file.read(_LONGEST_ROW)
        lines = io.BytesIO(chunk).readlines()
        if lines and not lines[-1].endswith(b"\n") and len(lines[-1]) <= _LONGEST_ROW:
            lines.pop()  # an incomplete row that is still being written
        return lines

    def _leave(self) -> None:
        """Release a folder that is full, after deleting the index in it."""
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
        """Add rows to the tables. If a row belongs to an earlier step than the rows before it, a
        run was resumed there, and the steps after it are dropped."""
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
        """Return the latest texts, limited in number and total length."""
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
        """Messages about the parts of the file that exceed the limits of the index."""
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
        """Open the index of an earlier process. Return False if it does not belong to this file.
        The index may have been written by another user. Numbers that are impossible for the file
        are therefore rejected, and the index cannot use more memory than the file could."""
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
            # The holes of a sparse file contain no rows.
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
    """Return a count read from an index. Raises ValueError if the count is impossible."""
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
    """Return a digest of the beginning and end of the first ``offset`` bytes of a file."""
    if not offset:
        return ""
    parts = []
    for start in (0, max(0, offset - _KNOWN_BYTES)):
        file.seek(start)
        parts.append(file.read(min(_KNOWN_BYTES, offset)))
    return digest_of_parts(parts)


def _places(path: Path) -> list[Path]:
    """Return the folders that may contain the index of a file, in order of preference."""
    path = path.resolve()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-dashboard"
    return [path.with_name(f".{path.name}.index"), cache / digest(os.fsencode(path))]


def _open_folder(places: list[Path]) -> tuple[Path, Lock | None]:
    """Return the first folder that is writable, and the lock on it. If another process has locked
    that folder, or no folder is left, return a temporary folder of this process, and None for the
    lock. Removes the folders that it has tried from ``places``."""
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
    """Return whether a folder contains only files of an index. Folders of runs are shared, and a
    link in one could point to files that must not be changed."""
    if folder.is_symlink():
        return False
    with os.scandir(folder) as entries:
        return all(
            _OWN.fullmatch(entry.name)
            and entry.is_file(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_nlink == 1
            for entry in entries
        )
