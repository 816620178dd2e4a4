"""Sets up a process for DeepSpeed: device, CPU cores and torch.distributed."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.config import ConfigError, ParallelConfig, RunConfig
from megatron.parallel.meeting import Facts, run_meeting, together_with_others
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.util.phases import activity
from megatron.util.processes import core_order, is_main_process, keep_freed_memory

logger = logging.getLogger(__name__)

STALE_LOCK_SECONDS = 600.0
_WORKSPACES = (":4096:8", ":16:8")
"""cuBLAS workspace settings with which, according to its manual, sums have a fixed order."""


def world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher. Raises
    ConfigError if srun or mpirun started several processes without setting their ranks in the
    environment, or if a launcher's environment variable is invalid."""
    name, tasks = tasks_of_scheduler()
    if "WORLD_SIZE" not in os.environ and tasks > 1:
        raise ConfigError(
            f"{name} is {tasks} and WORLD_SIZE is not set: every process would "
            "train alone; start with deepspeed or torchrun, or set RANK, LOCAL_RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
        )
    size = _whole_number("WORLD_SIZE", 1, 1)
    rank = _whole_number("RANK", 0, 0)
    if rank >= size:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={size}: ranks count from 0")
    for name, least in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("LOCAL_SIZE", 1)):
        _whole_number(name, least, least)
    return size


def _whole_number(name: str, default: int, least: int) -> int:
    """Return the integer in a launcher's environment variable. Raises ConfigError if invalid."""
    given = os.environ.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal()) or not least <= int(given[:10]) < 2**31:
        raise ConfigError(
            f"{name}={given} in the environment: launchers set it to a whole number from {least} "
            "on; correct or unset it"
        )
    return int(given)


def tasks_of_scheduler() -> tuple[str, int]:
    """Return the name of the environment variable with the number of processes that srun or mpirun
    has started, and that number. Return ("", 1) if there is only this process."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        tasks = _whole_number(name, 1, 1)
        if tasks > 1:
            return name, tasks
    return "", 1


def training_device() -> torch.device:
    """Return this process's GPU, or the CPU if there is no GPU or DS_ACCELERATOR is cpu."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        # A launcher may make only one GPU visible to each process, as slurm's --gpus-per-task does.
        alone = torch.cuda.device_count() == 1
        return torch.device("cuda", 0 if alone else int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def distributed(
    config: ParallelConfig,
    facts: Callable[[], Facts] | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Mesh]:
    """Start torch.distributed and create the layout's process groups, until the block ends. First
    the processes compare ``facts``, which must agree. ``within`` is a context that surrounds the
    block and the barrier at its end. Raises ConfigError if facts differ, several processes have no
    RANK, ``--local_rank`` contradicts the environment, nccl is selected but torch does not see the
    GPUs, gloo is selected for a pipeline on GPUs, the processes cannot connect, or a killed build
    of a DeepSpeed operator left a lock."""
    with ExitStack() as opened:
        opened.enter_context(_variables_of_launchers(config))
        device = training_device()
        backend = _backend(config, device)
        if together_with_others():
            own = {"the device": device.type, "the backend": backend}
            with _meeting(config):
                run_meeting().open(timedelta(minutes=config.distributed_timeout_minutes))
            known = {} if facts is None else facts()
            opened.enter_context(run_meeting().begin({**known, **own}, facts is not None))
        prepare_deepspeed()
        if device.type == "cuda":
            _let_segments_grow()
            torch.cuda.set_device(device)
            _tell_deepspeed(device)
            activity.device_busy = lambda: not torch.cuda.default_stream(device).query()
            opened.callback(setattr, activity, "device_busy", None)
        else:
            keep_freed_memory()
        opened.enter_context(own_cores(device))
        yield opened.enter_context(_process_groups(config, backend, within))


def _backend(config: ParallelConfig, device: torch.device) -> str:
    """Return the backend of torch.distributed for a device. Raises ConfigError if
    ``--distributed-backend`` names one that this device or a pipeline cannot use."""
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        if os.path.exists("/dev/nvidiactl"):
            raise ConfigError(
                "--distributed-backend nccl: this machine has an NVIDIA driver, and torch sees no "
                "GPU; run nvidia-smi, see CUDA_VISIBLE_DEVICES, or give --distributed-backend gloo "
                "to train on the CPU"
            )
        tell = logger.warning if is_main_process() else logger.debug  # once, not by every rank
        tell(
            "--distributed-backend nccl needs GPUs; this machine has none, and trains on the CPU "
            "with gloo"
        )
        backend = "gloo"
    if backend == "gloo" and device.type == "cuda" and config.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"--distributed-backend gloo, --pipeline-model-parallel-size "
            f"{config.pipeline_model_parallel_size}: gloo cannot send tensors of GPUs between "
            "stages; leave out --distributed-backend to use nccl, or hide the GPUs by "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return backend


@contextmanager
def _variables_of_launchers(config: ParallelConfig) -> Iterator[None]:
    """Set the environment variables that a launcher would, where they are missing, until the block
    ends: a later start in this process must choose its own. Raises ConfigError if they contradict
    each other or ``--local_rank``."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} in the environment without RANK: launchers "
            "set both for each process; start with deepspeed or torchrun, or unset WORLD_SIZE to "
            "train on one process"
        )
    local = str(config.local_rank or 0)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": local, "MASTER_ADDR": "127.0.0.1"}
    added = {name: value for name, value in alone.items() if name not in os.environ}
    if config.local_rank not in (None, int(os.environ.get("LOCAL_RANK", local))):
        raise ConfigError(
            f"--local_rank {config.local_rank} contradicts LOCAL_RANK={os.environ['LOCAL_RANK']} "
            "in the environment; leave out the flag"
        )
    if "MASTER_PORT" not in os.environ:
        added["MASTER_PORT"] = str(_free_port())
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def deterministic_kernels(config: RunConfig) -> Iterator[None]:
    """With ``--deterministic-mode``, run only GPU kernels that sum in the same order in every run.
    Enter this context before CUDA starts. Raises ConfigError if the environment contradicts it.

    Tensor-parallel ranks compute the norms of a layer separately. With tensor parallelism torch's
    compiler therefore never chooses a kernel by benchmarking: ranks could choose differently, and
    their copies of weights would drift apart.
    """
    asked = config.fast_paths.deterministic_mode
    if asked or config.parallel.tensor_model_parallel_size > 1:
        _choose_kernels_without_measuring()
    if not asked:
        yield
        return
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
    if workspace not in _WORKSPACES:
        raise ConfigError(
            f"--deterministic-mode contradicts CUBLAS_WORKSPACE_CONFIG={workspace} in the "
            f"environment: unset it, or set it to {' or '.join(_WORKSPACES)}"
        )
    before = torch.are_deterministic_algorithms_enabled()
    # Filling new tensors costs time and only helps to find programming errors.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _choose_kernels_without_measuring() -> None:
    if not torch.cuda.is_available():  # the compiler never benchmarks code for CPUs
        return
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read when the compiler is imported
    settings = sys.modules.get("torch._inductor.config")
    if settings is not None:
        settings.deterministic = True  # type: ignore[attr-defined]


def _meeting(config: ParallelConfig) -> AbstractContextManager[None]:
    """Return :func:`meeting` for all processes, at the launcher's address and port."""
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    address, given = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not given.isdecimal() or not 0 < int(given) < 2**16:
        raise ConfigError(f"MASTER_PORT={given}: expected a port, a number from 1 to 65535")
    port = int(given)
    origin = "deepspeed --master_port" if "CROSS_SIZE" in os.environ else "MASTER_PORT"
    who = f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    return meeting(who, address, port, origin, timeout)


@contextmanager
def _process_groups(
    config: ParallelConfig, backend: str, within: Callable[[], AbstractContextManager[Any]]
) -> Iterator[Mesh]:
    import deepspeed

    from megatron.engine.deepspeed_patches import sharing_groups

    # Next to GEMMs that fill the GPU, a collective starts in time only if its stream has priority.
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    with _meeting(config):
        deepspeed.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timeout,
            init_method=run_meeting().init_method if together_with_others() else None,
        )
    if backend != "nccl":
        # DeepSpeed binds the world group to a GPU. torch would then create further groups by
        # splitting that group, which only NCCL supports.
        world: Any = dist.group.WORLD
        world.bound_device_id = None
    healthy = False
    try:
        with within():
            mesh = build_mesh(config.axes, timeout)
            with sharing_groups(mesh.handles):
                yield mesh
            # A process that exits while another is still in a collective can crash the other one.
            dist.barrier(device_ids=[torch.cuda.current_device()] if backend == "nccl" else None)
            healthy = True
    finally:
        # NCCL's shutdown waits for all ranks, some of which may be waiting for this one. After an
        # error this process ends, and the launcher ends the others.
        if dist.is_initialized() and (healthy or backend != "nccl"):
            deepspeed.comm.destroy_process_group()


@contextmanager
def meeting(who: str, address: str, port: int, origin: str, timeout: timedelta) -> Iterator[None]:
    """Replace torch's error by a ConfigError that says why the processes cannot connect.

    Args:
        who: this process, such as ``process 1 of 4``.
        address: address of the first process, which listens.
        origin: flag or environment variable that sets ``port``.
    """
    try:
        yield
    except dist.DistError as error:
        text, minutes = str(error), timeout.total_seconds() / 60
        if "EADDRINUSE" in text:
            raise ConfigError(
                f"{origin} {port}: the port is in use by another program on this machine, perhaps "
                f"another run; choose a free one with {origin}"
            ) from error
        if "waiting for clients" in text:
            raise ConfigError(
                f"{who} waited {minutes:g} minutes (--distributed-timeout-minutes) at "
                f"{address}:{port} ({origin}) for the others ({_joined(text)}); start them with "
                "the same address and port, and see whether they print an error"
            ) from error
        if "timed out" in text or "failed to connect" in text.lower():
            raise ConfigError(
                f"{who} could not reach {address}:{port} ({origin}) within {minutes:g} minutes "
                "(--distributed-timeout-minutes); the first must be running there with the same "
                "port, and no firewall between them"
            ) from error
        raise


def _joined(text: str) -> str:
    """Return torch's count of connected processes, such as ``1/2 clients joined``."""
    joined = re.search(r"\d+/\d+ clients joined", text)
    return joined[0] if joined else "not all came"


def _tell_deepspeed(device: torch.device) -> None:
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            os.environ[name] = str(device.index)


def _let_segments_grow() -> None:
    """Make torch's GPU allocator extend its memory segments. Segments of fixed sizes, its default,
    waste memory between them. A user's own configuration takes precedence. torch reads the variable
    at the first allocation. Only cudaIpcGetMemHandle, unused here, does not support this."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if torch.version.hip is None and not any(map(os.environ.get, names)):
        os.environ[names[0]] = "expandable_segments:True"


@contextmanager
def own_cores(device: torch.device) -> Iterator[None]:
    """Divide the node's cores among its processes until the block ends: a thread per core, unless
    OMP_NUM_THREADS is set. In CPU training each process is bound to neighbouring cores.

    A process that slurm, numactl or taskset has already bound keeps its cores. It uses all of them
    if they are no more than its share of the node. OMP_PROC_BIND disables binding. Threads that
    exist before the block are not bound.
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
    os.sched_setaffinity(0, sorted(cores, key=core_order)[first : first + share])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def prepare_deepspeed() -> None:
    """Make DeepSpeed import and start quickly, quietly and without compilation.

    torch's compiler is not imported until something is compiled. gloo replaces DeepSpeed's
    shared-memory collectives, which would have to be compiled. Operators are built in the Python
    environment's own folder, so that environments do not wait for each other's locks. Raises
    ConfigError if a killed build left a lock.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    # Users cannot do anything about deprecations inside DeepSpeed and torch.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    _refuse_stale_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    with _not_installed("mlflow"):  # DeepSpeed's autotuner would import it, which takes seconds
        from deepspeed.utils import logger

    from megatron.engine.deepspeed_patches import start_without_compiler

    if os.environ["DS_LOG_LEVEL"] == "warning":
        logger.setLevel(logging.WARNING)
    start_without_compiler()


@contextmanager
def _not_installed(name: str) -> Iterator[None]:
    """Make a package appear not installed within this context, unless it is already imported."""
    before = name in sys.modules
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if not before:
            del sys.modules[name]


def _refuse_stale_locks(folder: Path) -> None:
    for lock in folder.glob("**/lock"):
        age = time.time() - lock.stat().st_mtime
        if age > STALE_LOCK_SECONDS:
            raise ConfigError(
                f"{lock} is {age / 60:.0f} minutes old: a build of a DeepSpeed operator was killed "
                "and the next one would wait for it indefinitely; delete the file"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Mpu:
    """Model-parallel unit (mpu), the interface through which DeepSpeed gets the groups of a
    :class:`Mesh`. Without it DeepSpeed assumes a tensor-parallel size of 1. There must be no method
    ``initialize_sequence_parallel``, or DeepSpeed would assume another kind of layout."""

    def __init__(self, mesh: Mesh) -> None:
        self._kinds = {
            "data": mesh.dense,
            "model": mesh.model,
            "tensor_model": mesh.tensor,
            "slice": mesh.tensor,
            "pipeline_model": mesh.pipeline,
        }

    def __getattr__(self, name: str) -> Any:
        """Return the method
        ``get_<kind>_parallel_<rank|world_size|group|group_ranks|src_rank>``."""
        kind, _, what = name.removeprefix("get_").partition("_parallel_")
        group = self.__dict__.get("_kinds", {}).get(kind)
        if group is not None:
            answers = {
                "rank": group.rank,
                "world_size": group.size,
                "group": group.handle,
                "group_ranks": list(group.ranks),
                "src_rank": group.ranks[0],
            }
            if what in answers:
                return lambda: answers[what]
        raise AttributeError(name)
