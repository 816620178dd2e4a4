"""An index of a file of metrics: its rows by kind, in columns that are read without the file.

It is kept in a folder beside the file, ``.NAME.index``, or in the user's cache where nobody may
write there or nothing more fits. What is appended to the file is added; a file that was replaced is
read again, and one that was copied with its index is not. A folder with links in it, which somebody
else may have made, is left alone.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from megatron.dashboard.tables import MetricTable, MetricTableState
from megatron.util.digests import digest, digest_of_parts
from megatron.util.files import open_regular, remove_partial, replacing
from megatron.util.locks import Lock, LockTakenError

FORMAT = 2
MOST_KINDS = 500
MOST_TEXTS = 2000
_CHUNK_BYTES = 1 << 22
_KNOWN_BYTES = 1 << 16
_MOST_STEPS = 1 << 53
_MANIFEST, _LOCK = "index.json", "lock"
_OWN = re.compile(r"lock|index\.json(\.partial-[0-9a-f]+)?|\d+-\d+\.f64")


class _UnwritableError(OSError):
    """Nothing more can be written where the index is."""


class RunIndex:
    """The rows of the file ``path``. Used by one thread at a time.

    Attributes:
        tables: by kind, in the order in which kinds appeared.
        texts: the last rows of the kind ``text``.
        broken: lines that are not rows, which are passed over.
        lines: read so far.
        generation: grows whenever the file was read from its beginning.

    Raises OSError if the file cannot be read, or no place takes its index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        with open_regular(path):
            pass  # so that a file without rights is named before anything else
        self._open(_places(path))

    def _open(self, places: list[Path]) -> None:
        """Takes the first of the folders that can be written, or one of this process alone."""
        self._places = places
        self._folder, self._lock = _open_folder(places)
        self.clear()
        if not self._restore():
            self._begin()

    def clear(self) -> None:
        """Forgets all rows."""
        self.tables: dict[str, MetricTable] = {}
        self.texts: list[dict[str, Any]] = []
        self.broken = self.lines = self.offset = self._last = 0
        self._mark = ""
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
        ``told`` gets the share of the file that was read. Where nothing more fits, as on a full
        disk, the index is made again elsewhere. Raises OSError if the file cannot be read, or no
        place takes its index."""
        while True:
            try:
                yield from self._read(told)
                return
            except _UnwritableError as error:
                own = self._lock is None
                self._leave()
                if own:
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
            file.seek(self.offset)
            before = self.offset
            try:
                while lines := file.readlines(_CHUNK_BYTES):
                    if not lines[-1].endswith(b"\n"):
                        lines.pop()  # half a row, whose rest is still to be written
                    if not lines:
                        break
                    try:
                        self._take(lines)
                    except OSError as error:
                        before = self.offset  # half the piece is in the tables: nothing is saved
                        raise _UnwritableError(error.errno, error.strerror) from None
                    self.offset += sum(map(len, lines))
                    told(min(1.0, self.offset / max(1, size)))
                    yield
            finally:  # also if nobody wants the rest
                if self.offset != before:
                    self._mark = _mark(file, self.offset)
                    with suppress(OSError):  # an earlier one is as good: its tables are cut to it
                        self._save()

    def _leave(self) -> None:
        """Gives back the place where nothing more fits, and what the index took of it."""
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
            "mark": self._mark,
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
            self.texts = [_text(row) for row in content["texts"]]
            self.offset, self.lines = int(content["offset"]), int(content["lines"])
            self.broken, self._last = int(content["broken"]), int(content["last"])
            self._mark = content["mark"]
            with open_regular(self.path) as file:
                same = self._mark == _mark(file, self.offset)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return False
        return same


def _text(row: dict[str, Any]) -> dict[str, Any]:
    words = {name: str(row.get(name) or "") for name in ("prompt", "answer", "reference")}
    return {"iteration": row["iteration"], **words, "ended": bool(row.get("ended", True))}


def _mark(file: Any, offset: int) -> str:
    """Tells a file from others by the beginning and the end of what was read of it."""
    if not offset:
        return ""
    parts = []
    for start in (0, max(0, offset - _KNOWN_BYTES)):
        file.seek(start)
        parts.append(file.read(min(_KNOWN_BYTES, offset)))
    return digest_of_parts(parts)


def _places(path: Path) -> list[Path]:
    """Where the index of a file may be kept."""
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
    """Whether a folder has files of an index and nothing else. Runs are passed on in folders, in
    which one with a link would lead to files that are not to be changed."""
    if folder.is_symlink():
        return False
    with os.scandir(folder) as entries:
        return all(
            _OWN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries
        )
