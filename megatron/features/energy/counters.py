"""Counters of energy: of NVIDIA GPUs by the driver's library, of processors and their memory by
Linux (RAPL), and the joules of all ranks of a run, each of which reads the counters where it is."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

NVML = "libnvidia-ml.so.1"
POWERCAP = Path("/sys/class/powercap")
_SECONDS = 30.0
"""Between two readings: a processor's counter begins again after minutes."""


class EnergyCounter(Protocol):
    """Joules since some time."""

    def joules(self) -> float:
        """Raises OSError if it cannot be read."""
        ...


class NvmlCounter:
    """The energy that one GPU has used since its driver was loaded. Raises OSError, whose message
    says why, if the driver's library is not there or the GPU has no counter: those before Volta and
    parts of a GPU (MIG) have none."""

    def __init__(self, uuid: str, library: str = NVML) -> None:
        self._nvml = ctypes.CDLL(library)
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
        self.joules()

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def _call(self, name: str, *arguments: object) -> None:
        try:
            status = getattr(self._nvml, name)(*arguments)
        except AttributeError:
            raise OSError(f"{NVML} has no {name}: the driver is too old") from None
        if status:
            text = self._nvml.nvmlErrorString
            text.restype = ctypes.c_char_p
            meaning: bytes = text(status)
            raise OSError(f"{name} gives {status} ({meaning.decode(errors='replace')})")


def uuid_of(device: torch.device) -> str:
    """Return the name by which NVML knows a CUDA device."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class RaplCounter:
    """The energy that the processors of this host have used since the counter was made, with the
    memory where that is counted. :meth:`joules` must be called more often than a counter begins
    again at 0, which takes about 20 minutes at 200 W. Raises FileNotFoundError if the host shows no
    such counters, PermissionError if this user may not read them."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        zones = _zones(folder)
        if not zones:
            raise FileNotFoundError(f"{folder} has no counters of processors")
        self._files = [zone / "energy_uj" for zone in zones]
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last = self._read()
        self._joules = 0.0

    def joules(self) -> float:
        last, self._last = self._last, self._read()
        for before, now, most in zip(last, self._last, self._ranges, strict=True):
            # A counter that was at its end has begun at 0.
            self._joules += (now - before if now >= before else now - before + most + 1) / 1e6
        return self._joules

    def _read(self) -> list[int]:
        return [int(file.read_text()) for file in self._files]


def _zones(folder: Path) -> list[Path]:
    """Packages, and the memory next to them; cores are parts of a package. The same zone is also
    shown by another interface (mmio), and the whole platform (psys) has packages in it."""
    zones = []
    for path in sorted(folder.glob("intel-rapl:*")):
        try:
            name = (path / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith("package") or name == "dram":
            zones.append(path)
    return zones


class Joules(NamedTuple):
    """Used since the meter was made; None where nothing counts them."""

    devices: float | None
    processors: float | None

    @property
    def total(self) -> float | None:
        known = [part for part in self if part is not None]
        return sum(known) if known else None


class EnergyMeter:
    """Adds up what counters of this process have counted since it was made, by kind. A thread reads
    them meanwhile. A counter that cannot be read is reported once, and its joules stay the same
    afterwards."""

    def __init__(self, counters: Sequence[tuple[str, EnergyCounter]]) -> None:
        self._counters: dict[int, tuple[str, EnergyCounter]] = dict(enumerate(counters))
        self._kinds = [kind for kind, _ in counters]
        self._lock = threading.Lock()
        self._first = [counter.joules() for _, counter in counters]
        self._last = list(self._first)
        self._end = threading.Event()
        if counters:
            threading.Thread(target=self._read_often, name="energy", daemon=True).start()

    def used(self, kinds: Sequence[str]) -> list[float]:
        """Joules of the counters of each kind."""
        with self._lock:
            self._read()
            used = [last - first for first, last in zip(self._first, self._last, strict=True)]
        pairs = list(zip(self._kinds, used, strict=True))
        return [sum(joules for kind, joules in pairs if kind == each) for each in kinds]

    def close(self) -> None:
        self._end.set()

    def _read_often(self) -> None:
        while not self._end.wait(_SECONDS):
            with self._lock:
                self._read()

    def _read(self) -> None:
        for number, (kind, counter) in list(self._counters.items()):
            try:
                self._last[number] = counter.joules()
            except (OSError, ValueError) as error:
                logger.warning("energy of %s is no longer counted: %s", kind, error)
                del self._counters[number]


class RunEnergy:
    """The joules of a run. Every rank makes one and calls :meth:`used` in the same places. Of ranks
    that share a GPU, or a host's processors, the first reads the counter."""

    KINDS = ("devices", "processors")

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._world, self._device = mesh.world, device
        host = socket.gethostname()
        gpu = uuid_of(device) if device.type == "cuda" else None
        places = [(host, gpu)] * mesh.world.size
        if mesh.world.size > 1:
            dist.all_gather_object(places, places[mesh.world.rank])
        before = places[: mesh.world.rank]
        self.absent = list[str]()
        """Counters that are not there, a line each."""
        self.refused = list[str]()
        """Counters that are there and cannot be read, with the reason."""
        counters = list[tuple[str, EnergyCounter]]()
        if gpu is not None and (host, gpu) not in before:
            self._add(counters, "devices", lambda: NvmlCounter(gpu))
        if host not in [name for name, _ in before]:
            self._add(counters, "processors", RaplCounter)
        self._meter = EnergyMeter(counters)
        self._known = self._sum([float(any(k == kind for k, _ in counters)) for kind in self.KINDS])

    def _add(
        self,
        counters: list[tuple[str, EnergyCounter]],
        kind: str,
        make: Callable[[], EnergyCounter],
    ) -> None:
        what = f"energy of {kind} is not counted"
        try:
            counters.append((kind, make()))
        except FileNotFoundError as error:
            self.absent.append(f"{what}: {error}")
        except PermissionError as error:
            self.refused.append(f"{what}: only root may read {error.filename}")
        except (OSError, ValueError) as error:
            self.refused.append(f"{what}: {error}")

    @property
    def counted(self) -> bool:
        """True if any rank has a counter."""
        return any(self._known)

    def used(self) -> Joules:
        """Joules of all ranks since the start."""
        if not self.counted:
            return Joules(None, None)
        sums = self._sum(self._meter.used(self.KINDS))
        return Joules(*(s if n else None for s, n in zip(sums, self._known, strict=True)))

    def close(self) -> None:
        self._meter.close()

    def _sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        if self._world.size > 1:
            total = total.to(self._device)
            dist.all_reduce(total)
        return [float(value) for value in total.tolist()]
