"""Results of the suite: a folder, and the file in which it travels.

The folder has a JSON file of every cell that was measured, traces, torch.compile's cache, and
``begun.json``: how often a cell was begun, so that one that was cut off is known. A bundle is a tar
of it without what is large. Merging takes the best result of every cell from several bundles.
"""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.util.files import write_whole

Found = dict[str, Any]
BUNDLE_BYTES = 12_000_000
"""A bundle is not larger: traces and compiled code are left out that would make it so."""
CACHE_BYTES = 40_000_000
"""Compiled code beyond this is not even tried."""


class Results:
    """A folder of results of one device; made if it is not there.

    Attributes:
        begun: by cell, the seconds that it was given each time it was begun without a result; 0
            where that is not known, since the whole suite was ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("cells", "traces", "cache"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.begun = self._read_begun()

    def of(self, name: str) -> Found | None:
        """Return the result of a cell; None if it has not been measured."""
        try:
            return json.loads((self.folder / "cells" / f"{name}.json").read_text())
        except FileNotFoundError:
            return None

    def trace(self, name: str) -> Path:
        """File of a cell's trace."""
        return self.folder / "traces" / f"{name}.json.gz"

    def begin(self, name: str) -> None:
        """A cell begins."""
        self.begun.setdefault(name, []).append(0.0)
        self._write("begun.json", self.begun)

    def cut_off(self, name: str, seconds: float) -> None:
        """It had this much time, which was not enough."""
        self.begun[name][-1] = seconds
        self._write("begun.json", self.begun)

    def put(self, name: str, found: Found) -> None:
        """Keeps what was found; a cell that is finished is no longer begun."""
        self._write(f"cells/{name}.json", found)
        if finished(found):
            self.begun.pop(name, None)
        self._write("begun.json", self.begun)

    def forget_failures(self) -> None:
        """Has every cell measured again that has no numbers."""
        for path in (self.folder / "cells").glob("*.json"):
            if failure(json.loads(path.read_text())) is not None:
                path.unlink()

    def device(self) -> str | None:
        """The device that the results are of."""
        for path in sorted((self.folder / "cells").glob("*.json")):
            return json.loads(path.read_text())["machine"]["device"]
        return None

    def all(self) -> dict[str, Found]:
        """Every result by the name of its cell."""
        paths = sorted((self.folder / "cells").glob("*.json"))
        return {path.stem: json.loads(path.read_text()) for path in paths}

    def unpack(self, bundle: Path) -> None:
        """Adds what a bundle has and the folder lacks.

        Raises:
            ValueError: it is not one; the message names the file.
        """
        for name, content in unpacked(bundle).items():
            path = PurePosixPath(name)
            target = self.folder / path
            if not (path.is_absolute() or ".." in path.parts or target.exists()):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        self.begun = self._read_begun()

    def pack(self, bundle: Path) -> None:
        """Writes the bundle: results first, then traces and compiled code as far as they fit."""
        cells = [*self._files("cells"), *(self.folder / n for n in ("begun.json", "results.md"))]
        parts = [[path] for path in sorted(self._files("traces"), key=_size)]
        cache = self._files("cache")
        if cache and sum(map(_size, cache)) <= CACHE_BYTES:
            parts.append(cache)
        content = packed(self._contents(cells))
        for part in parts:
            larger = packed(self._contents([*cells, *part]))
            if len(larger) > BUNDLE_BYTES:
                break
            cells, content = [*cells, *part], larger
        write_whole(bundle, content)

    def _read_begun(self) -> dict[str, list[float]]:
        path = self.folder / "begun.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _files(self, name: str) -> list[Path]:
        return [path for path in sorted((self.folder / name).rglob("*")) if path.is_file()]

    def _contents(self, paths: Iterable[Path]) -> dict[str, bytes]:
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for path in paths
            if path.exists()
        }

    def _write(self, name: str, content: Any) -> None:
        write_whole(self.folder / name, (json.dumps(content, indent=1) + "\n").encode())


def packed(contents: Mapping[str, bytes]) -> bytes:
    """A tar of these files, compressed."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as file:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def unpacked(bundle: Path) -> dict[str, bytes]:
    """The files in a bundle by their names.

    Raises:
        ValueError: it is not one; the message names the file.
    """
    found = {}
    try:
        with tarfile.open(bundle) as file:
            for member in file:
                content = file.extractfile(member)
                if content is not None:
                    found[member.name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, KeyError) as error:
        raise _no_bundle(bundle, error) from None
    return found


def _no_bundle(bundle: Path, error: Exception) -> ValueError:
    said = " ".join(str(error).split())
    return ValueError(
        f"{bundle}: {said}; expected a file that --bundle wrote: name that one, or none that exists"
    )


def _size(path: Path) -> int:
    return path.stat().st_size


def finished(found: Found | None) -> bool:
    """True if a cell has its whole result, not one that was cut off."""
    return found is not None and not found.get("unfinished", False)


def failure(found: Found) -> str | None:
    """Reason why a result has no numbers; None if it has."""
    return found.get("failed") or found.get("missing") or found.get("cannot_fit")


def read_bundle(bundle: Path) -> dict[str, Found]:
    """The results in a bundle by the names of their cells.

    Raises:
        ValueError: it is not one; the message names the file.
    """
    try:
        return {
            PurePosixPath(name).stem: json.loads(content)
            for name, content in unpacked(bundle).items()
            if PurePosixPath(name).match("cells/*.json")
        }
    except json.JSONDecodeError as error:
        raise _no_bundle(bundle, error) from None


def merged(bundles: Iterable[Mapping[str, Found]]) -> dict[str, dict[str, Found]]:
    """Results by device and cell: of several for one cell the newest, one with numbers before one
    without."""
    devices: dict[str, dict[str, Found]] = {}
    for bundle in bundles:
        for name, found in bundle.items():
            known = devices.setdefault(found["machine"]["device"], {})
            if name not in known or _worth(found) >= _worth(known[name]):
                known[name] = found
    return devices


def _worth(found: Found) -> tuple[bool, str]:
    return failure(found) is None, found["date"]
