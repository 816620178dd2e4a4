"""Where the ranks of a run are: hosts, their devices, processors and memory."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megatron.parallel.mesh import Mesh


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is. ``device`` is the name of its accelerator, or of its processor; ``number``
    which accelerator of its host it is by :mod:`torch`'s count, None without one."""

    host: str
    device: str
    number: int | None
    processors: int
    memory_bytes: int


def own_place(device: torch.device) -> RankPlace:
    """Where this process is."""
    on_gpu = device.type == "cuda"
    number = (device.index or 0) if on_gpu else None
    return RankPlace(
        socket.gethostname(),
        torch.cuda.get_device_name(device) if on_gpu else _processor(),
        number,
        os.cpu_count() or 1,
        psutil.virtual_memory().total,
    )


def places_of_ranks(mesh: Mesh, device: torch.device) -> list[RankPlace]:
    """Where all ranks are, in their order. Every rank calls it."""
    places: list[RankPlace] = [own_place(device)] * mesh.world.size
    if mesh.world.size > 1:
        dist.all_gather_object(places, places[mesh.world.rank])
    return places


def by_host(places: Sequence[RankPlace]) -> list[dict[str, object]]:
    """The ranks of each host, as JSON values."""
    hosts = dict.fromkeys(place.host for place in places)
    found = []
    for host in hosts:
        here = {rank: place for rank, place in enumerate(places) if place.host == host}
        first = next(iter(here.values()))
        found.append(
            {
                "host": host,
                "ranks": list(here),
                "devices": [place.device for place in here.values()],
                "numbers": [place.number for place in here.values()],
                "processors": first.processors,
                "memory_bytes": first.memory_bytes,
            }
        )
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
