"""The energy counters of processors and their memory (RAPL), as Linux shows them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path("/sys/class/powercap")


class RaplCounter:
    """The energy that the processors of this host have used since the counter was made, with the
    memory where that is counted. :meth:`joules` must be called more often than a counter begins
    again at 0, which takes about 20 minutes at 200 W. Raises FileNotFoundError if the host shows no
    such counters, PermissionError if this user may not read them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._zones = [_Zone(path) for path in _zones(folder)]
        if not self._zones:
            raise FileNotFoundError(f"{folder} has no counters of processors")
        self._joules = 0.0

    def joules(self) -> float:
        """Since the counter was made."""
        self._joules += sum(zone.since_last() for zone in self._zones) / 1e6
        return self._joules


class _Zone:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = self._read()

    def since_last(self) -> int:
        """Microjoules. A counter that was at its end has begun at 0."""
        last, self._last = self._last, self._read()
        used = self._last - last
        return used if used >= 0 else used + self._range + 1

    def _read(self) -> int:
        return int(self._file.read_text())


def _zones(folder: Path) -> list[Path]:
    """Packages, and the memory beside them; cores are parts of a package. The same zone is also
    shown by another interface (mmio), and the whole platform (psys) has packages in it."""
    found = []
    for path in sorted(folder.glob("intel-rapl:*")):
        try:
            name = (path / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith("package") or name == "dram":
            found.append(path)
    return found
