"""Energy, device time, cost and CO2 of a run, summed over its restarts and shown in the log.

NVIDIA's driver counts the energy of GPUs, and Linux (RAPL) that of processors and their memory.
Each rank reads the counters of its host, and the joules are summed over all ranks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil
import torch
import torch.distributed as dist

from megatron.config import RunConfig
from megatron.features.energy.flags import EnergyFlags
from megatron.parallel.mesh import Mesh
from megatron.training.report import Reporter
from megatron.training.resume import ResumePoint
from megatron.training.trainer import Callback
from megatron.util.errors import one_line
from megatron.util.files import read_regular, write_whole
from megatron.util.json_text import parse_json

logger = logging.getLogger(__name__)

NVML = "libnvidia-ml.so.1"
POWERCAP = Path("/sys/class/powercap")
_BETWEEN_READINGS = 30.0
"""Seconds between two readings. A processor's counter wraps around after minutes."""


class EnergyCounter(Protocol):
    """Counter of joules since an arbitrary time."""

    def joules(self) -> float:
        """Return the joules. Raises OSError if the counter cannot be read."""
        ...


class NvmlCounter:
    """Energy that one GPU has used since its driver was loaded. Raises OSError, with the reason, if
    the driver's library is missing or the GPU has no counter, as before Volta and in MIG mode."""

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
    """Return the UUID by which NVML identifies a CUDA device."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class RaplCounter:
    """Energy that the processors of this host, and their memory if it is counted, have used since
    this object was created. :meth:`joules` must be called more often than a counter wraps around to
    0, which takes about 20 minutes at 200 W. Raises FileNotFoundError if the host has no such
    counters, and PermissionError if this user may not read them."""

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
            # A smaller value means that the counter has wrapped around.
            self._joules += (now - before if now >= before else now - before + most + 1) / 1e6
        return self._joules

    def _read(self) -> list[int]:
        return [int(file.read_text()) for file in self._files]


def _zones(folder: Path) -> list[Path]:
    """Return the RAPL zones to read: packages, which include their cores, and memory. The mmio
    interface shows the same zones again, and the platform zone (psys) includes the packages."""
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
    """Joules used since the meter was created; None for kinds without a counter."""

    devices: float | None
    processors: float | None

    @property
    def total(self) -> float | None:
        known = [part for part in self if part is not None]
        return sum(known) if known else None


class EnergyMeter:
    """Joules of this process by kind of counter, since the meter was created. A background thread
    reads the counters regularly. A counter that fails is reported once, and its value stays
    constant."""

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
        """Return the sum of joules for each kind of counter."""
        with self._lock:
            self._read()
            used = [last - first for first, last in zip(self._first, self._last, strict=True)]
        pairs = list(zip(self._kinds, used, strict=True))
        return [sum(joules for kind, joules in pairs if kind == each) for each in kinds]

    def close(self) -> None:
        self._end.set()

    def _read_often(self) -> None:
        while not self._end.wait(_BETWEEN_READINGS):
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
    """Energy of a run. Every rank creates one and calls :meth:`used` at the same points. If several
    ranks share a GPU, or a host's processors, the first of them reads the counter."""

    KINDS = ("devices", "processors")

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._world, self._device = mesh.world, device
        host = socket.gethostname()
        gpu = uuid_of(device) if device.type == "cuda" else None
        before = mesh.world.gathered((host, gpu))[: mesh.world.rank]
        self.absent = list[str]()
        """Messages about counters that do not exist."""
        self.refused = list[str]()
        """Messages about counters that cannot be read, with the reason."""
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
        """Return the joules of all ranks since the start."""
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


FILE = "run/totals.json"
"""File with the totals, relative to the folder of checkpoints."""
_BETWEEN_WRITES = 10.0
"""Seconds between two writes of the totals, each of which waits for the disk."""


@dataclass(frozen=True)
class Totals:
    """Totals of a run. A value is 0 if it was not measured or its price is unknown."""

    devices_joules: float = 0.0
    processors_joules: float = 0.0
    device_seconds: float = 0.0
    cost: float = 0.0
    co2_grams: float = 0.0

    @property
    def joules(self) -> float:
        return self.devices_joules + self.processors_joules

    def plus(self, other: Totals) -> Totals:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Totals(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class Prices:
    """Price per device-hour, in any currency, and grams of CO2 per kWh. None if unknown."""

    device_hour: float | None = None
    gco2_per_kwh: float | None = None

    def totals(self, joules: Joules, device_seconds: float) -> Totals:
        """Return the totals for these joules and device seconds, with their cost and CO2."""
        kwh = (joules.total or 0.0) / 3.6e6
        return Totals(
            joules.devices or 0.0,
            joules.processors or 0.0,
            device_seconds,
            self.cost(device_seconds) or 0.0,
            kwh * (self.gco2_per_kwh or 0.0),
        )

    def cost(self, device_seconds: float) -> float | None:
        if self.device_hour is None:
            return None
        return device_seconds / 3600 * self.device_hour

    def spending(
        self, totals: Totals, joules: Joules, cost_left: float | None
    ) -> dict[str, float | None]:
        """Return the values for the log. Totals that this start of the run cannot measure are left
        out."""
        values = dataclasses.asdict(totals) | {"energy_joules": totals.joules}
        counted = {
            "energy_joules": joules.total is not None,
            "devices_joules": joules.devices is not None,
            "processors_joules": joules.processors is not None,
            "device_seconds": True,
            "cost": self.device_hour is not None,
            "co2_grams": joules.total is not None and self.gco2_per_kwh is not None,
        }
        spent = {name: values[name] for name, known in counted.items() if known}
        return spent if cost_left is None else spent | {"cost_left": cost_left}


def read_totals(folder: Path) -> Totals:
    """Read the totals of a run from its folder of checkpoints. Return zeros if the file is missing,
    or damaged, which logs a warning."""
    path = folder / FILE
    try:
        content = parse_json(read_regular(path), str(path))
        fields = [field.name for field in dataclasses.fields(Totals)]
        values = [float(content.get(name, 0.0)) for name in fields]
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"{path} has values that no sum has")
    except FileNotFoundError:
        return Totals()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("energy and cost are counted from zero: %s", one_line(error))
        return Totals()
    return Totals(*values)


def write_totals(folder: Path, totals: Totals) -> None:
    """Write the totals. Raises OSError if they cannot be written; the old file then remains."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dataclasses.asdict(totals), indent=1).encode() + b"\n")


class SpendingCounter(Callback):
    """Callback that counts energy, and device time since the processes started. A resumed run adds
    what earlier starts have spent, including the steps that were lost."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        device: torch.device,
        report: Reporter,
        begin: ResumePoint,
    ) -> None:
        flags = EnergyFlags.of(config.logging)
        self._devices, self._main = mesh.world.size, mesh.world.rank == 0
        self._prices = Prices(flags.cost_per_gpu_hour, flags.grid_gco2_per_kwh)
        self._energy = RunEnergy(mesh, device)
        # Include the time since the processes started. Time in a scheduler's queue is not counted.
        age = max(0.0, time.time() - psutil.Process().create_time())
        self._began = time.monotonic() - age
        self._save = None if config.checkpoint.save is None else Path(config.checkpoint.save)
        self._before, self._warned = Totals(), False
        self._totals, self._write_at = Totals(), 0.0
        if self._main and begin.iteration:
            loaded = None if begin.folder is None else begin.folder.parent
            folders = [folder for folder in (self._save, loaded) if folder is not None]
            spent = (totals for totals in map(read_totals, folders) if totals != Totals())
            self._before = next(spent, Totals())
        report.at_line.append(self._spending)
        for line in self._energy.refused:
            report.say(line)
        if flags.grid_gco2_per_kwh is not None and not self._energy.counted:
            why = "; ".join([*self._energy.refused, *self._energy.absent])
            report.say(f"--grid-gco2-per-kwh has no effect: {why}")

    def _spending(self, seconds_left: float) -> dict[str, float | None]:
        """Return the values for a log line. Collective: all ranks must call this method."""
        joules = self._energy.used()
        device_seconds = self._devices * (time.monotonic() - self._began)
        self._totals = self._before.plus(self._prices.totals(joules, device_seconds))
        if time.monotonic() >= self._write_at:
            self._write()
        cost_left = self._prices.cost(self._devices * seconds_left)
        return self._prices.spending(self._totals, joules, cost_left)

    def _write(self) -> None:
        self._write_at = time.monotonic() + _BETWEEN_WRITES
        if self._save is None or not self._main or self._totals == Totals():
            return
        try:
            write_totals(self._save, self._totals)
        except OSError as error:
            if not self._warned:
                logger.warning("what the run has spent is not kept: %s", one_line(error))
            self._warned = True

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._write()
        self._energy.close()
