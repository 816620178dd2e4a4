"""An index of a file of metrics: its rows by kind, in columns that are read without the file.

It is kept in a folder beside the file, ``.NAME.index``, or in the user's cache where nobody may
write there. What is appended to the file is added; a file that was replaced is read again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import orjson

from megatron.dashboard.tables import MetricTable, MetricTableState
from megatron.util.digests import digest
from megatron.util.files import open_regular, replacing
from megatron.util.locks import Lock, LockTakenError

FORMAT = 1
MOST_KINDS = 500
MOST_TEXTS = 2000
_CHUNK_BYTES = 1 << 22
_BEGINNING_BYTES = 1 << 16
_MOST_STEPS = 1 << 53
_MANIFEST, _LOCK = "index.json", "lock"


class RunIndex:
    """The rows of the file ``path``. Used by one thread at a time.

    Attributes:
        tables: by kind, in the order in which kinds appeared.
        texts: the last rows of the kind ``text``.
        broken: lines that are not rows, which are passed over.
        lines: read so far.
        generation: grows whenever the file was read from its beginning.

    Raises OSError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        with open_regular(path):
            pass  # so that a file without rights is named before anything else
        self._folder, self._lock = _open_folder(path)
        self.clear()
        if not self._restore():
            self._begin()

    def clear(self) -> None:
        """Forgets all rows."""
        self.tables: dict[str, MetricTable] = {}
        self.texts: list[dict[str, Any]] = []
        self.broken = self.lines = self.offset = self._last = 0
        self._source: dict[str, Any] = {}
        self._waiting: dict[str, list[dict[str, Any]]] = {}

    def close(self) -> None:
        """Lets another process continue the index."""
        if self._lock is not None:
            self._lock.release()
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def version(self) -> str:
        """Differs whenever rows do."""
        return f"{self.generation}-{self.offset}"

    def update(self, told: Callable[[float], None] = lambda share: None) -> Generator[None]:
        """Reads what is new, a piece at a time; between two of them other threads may read tables.
        ``told`` gets the share of the file that was read. Raises OSError if it cannot be read."""
        with open_regular(self.path) as file:
            now = os.fstat(file.fileno())
            if now.st_size < self.offset or not self._is_same(file, now.st_ino):
                self._begin()
            if now.st_size == self.offset:
                return
            file.seek(self.offset)
            before = self.offset
            try:
                while lines := file.readlines(_CHUNK_BYTES):
                    if not lines[-1].endswith(b"\n"):
                        lines.pop()  # half a row, whose rest is still to be written
                    if not lines:
                        break
                    self._take(lines)
                    self.offset += sum(map(len, lines))
                    told(min(1.0, self.offset / max(1, now.st_size)))
                    yield
            finally:  # also if nobody wants the rest
                if self.offset != before:
                    file.seek(0)
                    beginning = file.read(min(_BEGINNING_BYTES, self.offset))
                    size = len(beginning)
                    self._source = {"inode": now.st_ino, "bytes": size, "digest": digest(beginning)}
                    self._save()

    def _is_same(self, file: Any, inode: int) -> bool:
        if not self._source:
            return self.offset == 0
        file.seek(0)
        beginning = digest(file.read(self._source["bytes"]))
        return bool(self._source["inode"] == inode and self._source["digest"] == beginning)

    def _begin(self) -> None:
        self.generation += 1
        self.clear()
        for path in self._folder.iterdir():
            if path.name != _LOCK:
                path.unlink()

    def _take(self, lines: list[bytes]) -> None:
        """Adds rows. One that continues from an earlier step makes the steps after it void, as the
        writer of the file does when a run is resumed."""
        self.lines += len(lines)
        for line in lines:
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
            self._waiting.setdefault(kind, []).append(row)
        self._flush()

    def _void(self, step: int) -> None:
        self._flush()
        for table in self.tables.values():
            table.cut_from(step)
        self.texts = [text for text in self.texts if text["iteration"] < step]
        self._last = min(self._last, step - 1)

    def _flush(self) -> None:
        for kind, rows in self._waiting.items():
            if kind == "text":
                self.texts = [*self.texts, *map(_text, rows)][-MOST_TEXTS:]
                continue
            if kind not in self.tables:
                if len(self.tables) == MOST_KINDS:
                    self.broken += len(rows)
                    continue
                number = len(self.tables)
                self.tables[kind] = MetricTable(self._folder, number, MetricTableState(kind, 0, []))
            self.tables[kind].append(rows)
        self._waiting = {}

    def _save(self) -> None:
        content = {
            "format": FORMAT,
            "source": self._source,
            "offset": self.offset,
            "lines": self.lines,
            "broken": self.broken,
            "last": self._last,
            "tables": [list(table.state) for table in self.tables.values()],
            "texts": self.texts,
        }
        with replacing(self._folder / _MANIFEST) as part:
            part.write_bytes(orjson.dumps(content))

    def _restore(self) -> bool:
        """Opens what an earlier process has read; False if it is not an index of this file."""
        try:
            content = orjson.loads((self._folder / _MANIFEST).read_bytes())
            if content["format"] != FORMAT:
                return False
            states = [MetricTableState(*state) for state in content["tables"]]
            for number, state in enumerate(states):
                self.tables[state.kind] = MetricTable(self._folder, number, state)
            self._source, self.texts = content["source"], content["texts"]
            self.offset, self.lines = content["offset"], content["lines"]
            self.broken, self._last = content["broken"], content["last"]
            with open_regular(self.path) as file:
                same = self._is_same(file, os.fstat(file.fileno()).st_ino)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return False
        return same


def _text(row: dict[str, Any]) -> dict[str, Any]:
    words = {name: str(row.get(name) or "") for name in ("prompt", "answer", "reference")}
    return {"iteration": row["iteration"], **words, "ended": bool(row.get("ended", True))}


def _open_folder(path: Path) -> tuple[Path, Lock | None]:
    """Where the index of a file is kept, and the lock on it; a folder of this process alone,
    without a lock, where another one has locked it or no place can be written."""
    path = path.resolve()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-dashboard"
    for folder in (path.with_name(f".{path.name}.index"), cache / digest(str(path))):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return folder, Lock(folder / _LOCK)
        except LockTakenError:
            break
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="megatron-dashboard-")), None
