"""What has to be right in the process before DeepSpeed starts: the device, torch.distributed, and
that nothing is compiled or waited for."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.config import ConfigError, ParallelConfig
from megatron.engine.cores import own_cores
from megatron.parallel.mesh import Mesh, build_mesh

STALE_LOCK_SECONDS = 600.0


def world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher.

    Raises:
        ConfigError: srun or mpirun started several processes that know nothing of each other.
    """
    if "WORLD_SIZE" not in os.environ:
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
            if int(os.environ.get(name, "1")) > 1:
                raise ConfigError(
                    f"{name} is {os.environ[name]} and WORLD_SIZE is not set: every process would "
                    "train alone; start by deepspeed or torchrun, or set RANK, LOCAL_RANK, "
                    "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
                )
    return int(os.environ.get("WORLD_SIZE", "1"))


def training_device() -> torch.device:
    """This process's GPU, or the CPU where there is none (or DS_ACCELERATOR=cpu)."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        # Launchers may show each process its own GPU only, as slurm's --gpus-per-task does.
        alone = torch.cuda.device_count() == 1
        return torch.device("cuda", 0 if alone else int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def distributed(config: ParallelConfig) -> Iterator[Mesh]:
    """torch.distributed and the layout's groups, for as long as the block runs.

    Raises:
        ConfigError: ``--distributed-backend`` does not fit the device, or a DeepSpeed operator
            build was left locked.
    """
    os.environ.setdefault("LOCAL_RANK", str(config.local_rank or 0))
    device = training_device()
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("--distributed-backend nccl needs GPUs; none is visible; use gloo")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    prepare_deepspeed()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _tell_deepspeed(device)
    else:
        _keep_freed_memory()
    with own_cores(device), _process_groups(config, backend) as mesh:
        yield mesh


@contextmanager
def _process_groups(config: ParallelConfig, backend: str) -> Iterator[Mesh]:
    import deepspeed

    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timeout,
    )
    healthy = False
    try:
        sizes = {
            "pipeline": config.pipeline_model_parallel_size,
            "tensor": config.tensor_model_parallel_size,
        }
        yield build_mesh(sizes, timeout)
        # A process that leaves while another is still in a collective can take that one down.
        dist.barrier()
        healthy = True
    finally:
        # NCCL's shutdown waits for all ranks, of which some may be waiting for this one. After an
        # error this process ends, and the launcher ends the others.
        if dist.is_initialized() and (healthy or backend != "nccl"):
            deepspeed.comm.destroy_process_group()


def _tell_deepspeed(device: torch.device) -> None:
    """Has DeepSpeed, which takes the GPU of the local rank's number, take this one."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            os.environ[name] = str(device.index)


def _keep_freed_memory() -> None:
    """Has glibc keep the memory of large tensors for the next ones.

    By default it gives every freed block of more than some megabytes back to the system, and the
    next logits fault in all their pages again: a tenth to a quarter of a step on a CPU at a
    vocabulary of 50,000.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)


def prepare_deepspeed() -> None:
    """Makes importing and starting DeepSpeed quick, quiet and free of compilation.

    torch's compiler, seconds to import, stays out until something is compiled. DeepSpeed's
    shared-memory collectives for CPUs are built when torch.distributed starts and need a compiler;
    gloo's own are used instead. Operators that are built after all go into the environment's own
    folder, so that environments do not wait on each other's locks.

    Raises:
        ConfigError: a killed build left its lock behind, on which the next would hang.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    # Deprecations inside DeepSpeed and torch say nothing that a user could act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    _refuse_stale_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    from deepspeed.utils import logger

    from megatron.engine.deepspeed_patches import start_without_compiler

    if os.environ["DS_LOG_LEVEL"] == "warning":
        logger.setLevel(logging.WARNING)
    start_without_compiler()


def _refuse_stale_locks(folder: Path) -> None:
    for lock in folder.glob("**/lock"):
        age = time.time() - lock.stat().st_mtime
        if age > STALE_LOCK_SECONDS:
            raise ConfigError(
                f"{lock} is {age / 60:.0f} minutes old: a build of a DeepSpeed operator was killed "
                "and the next one would wait for it for ever; delete the file"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
