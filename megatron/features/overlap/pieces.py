"""Asynchronous tensor parallelism by torch's compiler. An all-gather and the GEMM after it, or a
GEMM and the reduce-scatter after it, become one operator, which exchanges pieces through symmetric
memory while other pieces are multiplied (micro_pipeline_tp pass of torch._inductor)."""

from __future__ import annotations

import socket
import warnings

import torch
import torch.distributed as dist

from megatron.config import RunConfig
from megatron.config.engine import GRAPH_MODES
from megatron.engine.compilation import why_eager
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.collectives import Graphs
from megatron.parallel.mesh import Group, first_reason
from megatron.util.processes import is_main_process


def overlap_products(engine: TrainEngine) -> None:
    """Let the compiler fuse collectives with GEMMs, before an engine has run. If that is not
    possible, print the reason and change nothing. Every rank must call it."""
    group, device = engine.mesh.tensor, engine.device
    reason = _why_not(engine.config, device) or _why_apart(group, device)
    reason = first_reason(reason, device)
    if reason is not None:
        if is_main_process():
            print(f"--tp-comm-overlap: {reason}; collectives run as without it", flush=True)
        return
    join(group)


def join(group: Group) -> None:
    """Let the compiler fuse the collectives of a group with GEMMs."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():  # required, although deprecated
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.name)  # type: ignore[arg-type]
    config._micro_pipeline_tp = True
    Graphs.for_products = True


def _why_not(config: RunConfig, device: torch.device) -> str | None:
    """Return why the flags prevent fusion, or None if they do not."""
    eager, paths = why_eager(config, device), config.fast_paths
    if device.type != "cuda":
        return f"symmetric memory is of GPUs, not of a {device.type}"
    if eager is not None:
        return f"the blocks are not compiled (--torch-compile {eager})"
    if paths.torch_compile_mode in GRAPH_MODES:
        return f"CUDA graphs (--torch-compile-mode {paths.torch_compile_mode}) leave it out"
    if paths.in_8_bits:
        return f"--fp8-format {vars(paths)['fp8_format']} casts between collectives and products"
    return None


def _why_apart(group: Group, device: torch.device) -> str | None:
    """Return why the hardware prevents fusion, such as GPUs that cannot access each other's memory,
    or None if it does not. Collective: every rank must call it."""
    places = group.gathered((socket.gethostname(), device.index))
    hosts = {host for host, _ in places}
    if len(hosts) > 1:
        return f"tensor-parallel ranks are on several nodes ({', '.join(sorted(hosts))})"
    if device.type != "cuda":
        return None
    backend = dist.get_backend(group.handle)
    if backend != dist.Backend.NCCL:
        return f"the ranks communicate by {backend}, not by NCCL"
    for _, other in places:
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"GPU {device.index} does not reach the memory of GPU {other} (NVLink)"
    return None
