#!/usr/bin/env python
"""An all-reduce between CPU processes: in memory that they share, and over gloo.

    python benchmarks/all_reduce.py
    python benchmarks/all_reduce.py --processes 4 --dtype float32

CPU microseconds of a process and microseconds on the clock, medians over rounds in which both take
turns, one thread each, of ``megatron.parallel.collectives.start_all_reduce``.
"""

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from trainer_group import rank_environment

from megatron.parallel.collectives import start_all_reduce
from megatron.parallel.groups import Group
from megatron.parallel.host_memory import DISABLED

ELEMENTS = [2**10, 2**14, 2**17, 2**20, 2**23]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="how many, at most 8")
    parser.add_argument("--dtype", default="bfloat16", help="torch's name of the type")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are measured")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    processes = [
        context.Process(
            target=measure,
            args=(
                rank_environment(rank, options.processes, store.port),
                getattr(torch, options.dtype),
                options.rounds,
                far if rank == 0 else None,
            ),
            daemon=True,
        )
        for rank in range(options.processes)
    ]
    for process in processes:
        process.start()
    far.close()
    print(f"| elements, {options.dtype} | | CPU us | wall us |\n|---|---|---|---|")
    try:
        while True:
            elements, name, cpu, wall = near.recv()
            print(f"| {elements:,} | {name} | {cpu:,.0f} | {wall:,.0f} |", flush=True)
    except EOFError:
        pass
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


def measure(
    environment: dict[str, str], dtype: torch.dtype, rounds: int, pipe: Connection | None
) -> None:
    """The work of one rank; the first sends (elements, name, CPU us, wall us) of each case."""
    os.environ |= environment
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {}
    for name, disabled in (("shared memory", "0"), ("gloo", "1")):
        os.environ[DISABLED] = disabled
        ranks, rank = tuple(range(dist.get_world_size())), dist.get_rank()
        groups[name] = Group(ranks, rank, dist.group.WORLD)
        start_all_reduce(torch.ones(1), groups[name])()
    for elements in ELEMENTS:
        x = torch.zeros(elements, dtype=dtype)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        repeats = min(200, max(4, 2**23 // elements))
        for _ in range(rounds):
            for name, group in groups.items():
                work: Callable[[], torch.Tensor] = start_all_reduce(x, group)
                work()
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                for _ in range(repeats):
                    start_all_reduce(x, group)()
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                times[name].append((1e6 * cpu / repeats, 1e6 * wall / repeats))
        for name, found in times.items():
            if pipe is not None:
                cpus, walls = zip(*found, strict=True)
                pipe.send((elements, name, statistics.median(cpus), statistics.median(walls)))
    dist.barrier()
    if pipe is not None:
        pipe.close()
    # gloo's threads may still hold tensors; see megatron.training.run.end_process_after.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
