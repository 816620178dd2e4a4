"""Places of the ranks of a run: hosts, their devices, processors and memory."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron.parallel.mesh import Mesh

_MOST_LINES = 64


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank. ``device`` is the name of its accelerator, or of its processor; ``number``
    counts the accelerators of its host as :mod:`torch` does, None without one."""

    host: str
    device: str
    number: int | None
    processors: int
    memory_bytes: int


def own_place(device: torch.device) -> RankPlace:
    """Return the place of this process."""
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
    """Return the places of all ranks, in their order. Every rank calls it."""
    places: list[RankPlace] = [own_place(device)] * mesh.world.size
    if mesh.world.size > 1:
        dist.all_gather_object(places, places[mesh.world.rank])
    return places


def rank_map(places: Sequence[RankPlace]) -> list[str]:
    """Return a line for each host, for the log; the last hosts of very many are only counted."""
    lines = []
    for host in by_host(places):
        devices = Counter(host["devices"])
        what = ", ".join(f"{count} x {device}" for device, count in devices.items())
        lines.append(f"{host['host']} has {_ranks(host['ranks'])}: {what}")
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"and {more} hosts more"]


def _ranks(ranks: Sequence[int]) -> str:
    """Return words: rank 5, ranks 0 to 3, ranks 0, 2, 4."""
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    if list(ranks) == list(range(first, last + 1)):
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, ranks))}"


def by_host(places: Sequence[RankPlace]) -> list[dict[str, Any]]:
    """Return the ranks of each host, as JSON values."""
    hosts: dict[str, dict[int, RankPlace]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, {})[rank] = place
    return [
        {
            "host": host,
            "ranks": list(here),
            "devices": [place.device for place in here.values()],
            "numbers": [place.number for place in here.values()],
            "processors": next(iter(here.values())).processors,
            "memory_bytes": next(iter(here.values())).memory_bytes,
        }
        for host, here in hosts.items()
    ]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
