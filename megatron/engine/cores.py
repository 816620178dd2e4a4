"""Which of a node's cores a process works on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def own_cores(device: torch.device) -> Iterator[None]:
    """Divides the cores among this node's processes for as long as the block runs: as many threads
    each, unless OMP_NUM_THREADS says otherwise, and on a CPU neighbouring cores that it stays on.

    Left alone, the system moves threads between cores, whose caches they then fill anew. A process
    that is bound to some of the cores already, by slurm, numactl or taskset, is not bound again,
    and has all of them where they are no more than its share of the node. Where other programs work
    beside the training ``taskset`` chooses the cores, and OMP_PROC_BIND=false leaves all free to
    move. Threads that are there before the block are not bound.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
    bindable = hasattr(os, "sched_getaffinity")  # not on macOS
    everywhere = os.cpu_count() or 1
    cores = os.sched_getaffinity(0) if bindable else set(range(everywhere))
    bound = len(cores) < everywhere
    own = bound and len(cores) <= everywhere // processes
    share = len(cores) if own else len(cores) // processes
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, share))
    left_alone = bound or not bindable or "OMP_PROC_BIND" in os.environ
    if device.type != "cpu" or processes == 1 or not share or left_alone:
        yield
        return
    first = int(os.environ["LOCAL_RANK"]) * share
    os.sched_setaffinity(0, sorted(cores, key=_place)[first : first + share])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _place(core: int) -> tuple[int, int, int]:
    """Sorts cores so that those of a processor, and the two threads of one core, are neighbours."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package, number = (folder / name for name in ("physical_package_id", "core_id"))
        return int(package.read_text()), int(number.read_text()), core
    except OSError:
        return 0, core, core
