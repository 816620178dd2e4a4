"""Asynchronous tensor parallelism by torch's compiler: an all-gather and the product that follows
it, or a product and the reduce-scatter that follows, become one operator, which exchanges pieces
through symmetric memory while others are multiplied (torch._inductor's micro_pipeline_tp pass)."""

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
    """Let the compiler fuse collectives and products of an engine that has not run; if it cannot,
    report why and change nothing. Every rank must call it."""
    group, device = engine.mesh.tensor, engine.device
    reason = _why_not(engine.config, device) or _why_apart(group, device)
    reason = first_reason(reason, device)
    if reason is not None:
        if is_main_process():
            print(f"--tp-comm-overlap: {reason}; collectives run as without it", flush=True)
        return
    join(group)


def join(group: Group) -> None:
    """Let the compiler join the collectives of a group with products."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():  # it is needed still, though called deprecated
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.name)  # type: ignore[arg-type]
    config._micro_pipeline_tp = True
    Graphs.for_products = True


def _why_not(config: RunConfig, device: torch.device) -> str | None:
    """The reason in flags for which nothing can be joined."""
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
    """The reason in the machine: GPUs of a group that do not reach each other. Every rank must
    call it."""
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
