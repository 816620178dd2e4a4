"""The device that is measured: names, versions, limits, and which kernel attention is."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from contestants.process import visible_gpu
from machine import machine

from megatron.apps.profiling.categories import ATTENTION, kernel_category
from megatron.features.measured_peak.products import measure_matmul_peak
from megatron.features.measured_peak.rates import peak_flops

QUERY = (
    "name,driver_version,vbios_version,memory.total,power.limit,power.max_limit,"
    "clocks.max.sm,clocks.max.memory,clocks.sm,clocks.mem,temperature.gpu,pstate"
)
PACKAGES = ("triton", "flash_attn", "tokenizers", "pytest", "nvidia-cudnn-cu13", "nvidia-cublas")
ATTENTION_SHAPES = {
    "1.3B": (8, 16, 16, 2048, 128),
    "Qwen2.5-1.5B": (16, 12, 2, 1024, 128),
    "3B at 8192": (2, 24, 8, 8192, 128),
}
"""[B, N, K, S, D]: samples, heads of queries and of keys, sequence, width."""


def describe() -> dict[str, Any]:
    """Describe this machine: device, drivers, versions, the data sheet's rate and, on a CPU, a
    measured one. Initialises CUDA."""
    found = machine()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    sheet = peak_flops(device)
    found["peak_flops"] = sheet or measure_matmul_peak(torch.bfloat16, device, 0.3)
    found["peak_is"] = "data sheet" if sheet else "measured on square products"
    if device.type == "cuda":
        known = torch.cuda.get_device_properties(device)
        found |= {
            "memory_bytes": known.total_memory,
            "multiprocessors": known.multi_processor_count,
            "capability": f"{known.major}.{known.minor}",
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def environment() -> dict[str, Any]:
    """The machine cell: what nvidia-smi says, whether torch.compile can build code, and the kernels
    that torch chooses for attention, forward and backward."""
    return {
        "nvidia_smi": smi(),
        "c_compiler": next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
        "python_headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
        "attention_kernels": {name: kernels(*shape) for name, shape in attention_shapes().items()},
    }


def attention_shapes() -> dict[str, tuple[int, int, int, int, int]]:
    """Shapes of attention that are measured; one small one on a CPU."""
    if torch.cuda.is_available():
        return ATTENTION_SHAPES
    return {"tiny": (1, 2, 1, 32, 16)}


def smi(query: str = QUERY) -> dict[str, str]:
    """Return nvidia-smi's answer about the first visible GPU; empty without it."""
    try:
        done = subprocess.run(
            [
                "nvidia-smi",
                f"--query-gpu={query}",
                "--format=csv,noheader",
                f"--id={visible_gpu()}",
            ],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:  # an older driver does not know a field
        return {}
    values = [value.strip() for value in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(query.split(","), values, strict=False))


def attention_inputs(
    samples: int, heads: int, kv_heads: int, length: int, width: int
) -> tuple[torch.Tensor, ...]:
    """Queries [B, N, S, D], keys and values [B, K, S, D], bf16, with gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return tuple(
        torch.randn(
            samples, n, length, width, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        for n in (heads, kv_heads, kv_heads)
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as torch chooses it."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def kernels(*shape: int) -> list[str]:
    """Names of what runs for causal attention and its gradients: kernels on a GPU, operators on a
    CPU."""
    cuda = torch.cuda.is_available()
    inputs = attention_inputs(*shape)
    attend(*inputs).sum().backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        attend(*inputs).sum().backward()
        if cuda:
            torch.cuda.synchronize()
    events = [
        event
        for event in profile.events()
        if (event.device_type == torch.autograd.DeviceType.CUDA) == cuda
    ]
    names = list(dict.fromkeys(event.name for event in events))
    return [name for name in names if kernel_category(name, None) == ATTENTION] or names
