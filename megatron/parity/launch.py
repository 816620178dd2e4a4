"""Runs a function on several new processes of this machine."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def run_on(processes: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank.

    The processes find the environment that a launcher gives its workers, use this machine's GPUs if
    there are enough of them, and share its cores. What they print goes into a file that is thrown
    away.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with a rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = (processes, _free_port(), folder, function, args)
        mp.start_processes(_worker, job, nprocs=processes, start_method="spawn")  # type: ignore
        return [
            pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes())  # its own workers wrote it
            for rank in range(processes)
        ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _worker(
    rank: int, size: int, port: int, folder: str, function: Callable[..., Any], args: Any
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if torch.cuda.device_count() < size:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with open(Path(folder) / f"{rank}.out", "w") as out:
        sys.stdout.flush()
        os.dup2(out.fileno(), 1)
        result = function(*args)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(result))
