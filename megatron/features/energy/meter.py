"""The joules of all ranks of a run, whose counters each rank reads where it is."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron.features.energy.nvml import NvmlCounter, uuid_of
from megatron.features.energy.rapl import RaplCounter
from megatron.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

_SECONDS = 30.0
"""Between two readings: a processor's counter begins again after minutes."""


class EnergyCounter(Protocol):
    """Joules since some time."""

    def joules(self) -> float:
        """Raises OSError if it cannot be read."""
        ...


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
    them meanwhile. What cannot be read is said once, and counts as nothing from then on."""

    def __init__(self, counters: Sequence[tuple[str, EnergyCounter]]) -> None:
        self._counters = list(counters)
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
            pairs = [
                (kind, last - first)
                for (kind, _), first, last in zip(
                    self._counters, self._first, self._last, strict=True
                )
            ]
        return [sum(joules for kind, joules in pairs if kind == wanted) for wanted in kinds]

    def close(self) -> None:
        self._end.set()

    def _read_often(self) -> None:
        while not self._end.wait(_SECONDS):
            with self._lock:
                self._read()

    def _read(self) -> None:
        for number, (kind, counter) in enumerate(self._counters):
            try:
                self._last[number] = counter.joules()
            except (OSError, ValueError) as error:
                logger.warning("energy of %s is no longer counted: %s", kind, error)
                self._counters[number] = kind, _Stopped(self._last[number])


class _Stopped:
    def __init__(self, joules: float) -> None:
        self._joules = joules

    def joules(self) -> float:
        return self._joules


class RunEnergy:
    """The joules of a run. Every rank makes one and calls :meth:`used` in the same places. Of ranks
    that share a GPU, or a host's processors, the first reads the counter."""

    KINDS = ("devices", "processors")

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._world, self._device = mesh.world, device
        host = socket.gethostname()
        gpu = uuid_of(device) if device.type == "cuda" else None
        mine = [(host, gpu)] * mesh.world.size
        if mesh.world.size > 1:
            dist.all_gather_object(mine, mine[mesh.world.rank])
        before = mine[: mesh.world.rank]
        self.absent = list[str]()
        """Counters that are not there, a line each."""
        self.refused = list[str]()
        """Those that are there and cannot be read, with the reason."""
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
        try:
            counters.append((kind, make()))
        except FileNotFoundError as error:
            self.absent.append(f"energy of {kind} is not counted: {error}")
        except PermissionError as error:
            reason = f"only root may read {error.filename}"
            self.refused.append(f"energy of {kind} is not counted: {reason}")
        except (OSError, ValueError) as error:
            self.refused.append(f"energy of {kind} is not counted: {error}")

    @property
    def counted(self) -> bool:
        """Whether any rank has a counter."""
        return any(self._known)

    def used(self) -> Joules:
        """Of all ranks, since the start."""
        if not self.counted:
            return Joules(None, None)
        sums = self._sum(self._meter.used(self.KINDS))
        return Joules(*(s if n else None for s, n in zip(sums, self._known, strict=True)))

    def close(self) -> None:
        self._meter.close()

    def _sum(self, values: Sequence[float]) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64)
        if self._world.size > 1:
            found = found.to(self._device)
            dist.all_reduce(found)
        return [float(value) for value in found.tolist()]
