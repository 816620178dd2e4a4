"""What the estimates assume of the machines, as flags; everything here is printed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config import ConfigError
from megatron.config.flags import option

_UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


@dataclass(frozen=True)
class Hardware:
    """Machines: how many, how large, how fast (the defaults are those of a node of 8 A100)."""

    gpus: int | None = option(None)
    """Number of GPUs, one process each."""
    gpu_memory: str = option("80GiB")
    """Memory of one GPU, as in 80GiB."""
    memory_reserve: str = option("4GiB")
    """Part of it that is kept free: CUDA and NCCL, work space of kernels, fragmentation."""
    gpus_per_node: int = option(8)
    """GPUs that the fast links connect."""
    peak_tflops: float = option(312.0)
    """Dense 16-bit peak of one GPU, TFLOP/s (A100 312, H100 and H200 989, B200 2250)."""
    utilisation: float = option(0.6)
    """Share of the peak that a GPU reaches while it computes, waiting of any kind aside."""
    intra_node_bandwidth: float = option(300.0)
    """Gigabytes per second that a GPU sends inside a node (NVLink: A100 300, H100 450)."""
    inter_node_bandwidth: float = option(25.0)
    """Gigabytes per second that a GPU sends to other nodes (200 Gbit/s: 25, 400 Gbit/s: 50)."""
    tensor_overlap: float = option(0.4)
    """Share of tensor-parallel communication that is hidden behind computation (in the backward
    pass the collectives of the layers cut by columns run beside products)."""
    pipeline_overlap: float = option(0.0)
    """Share of the pipeline's sends and receives that is hidden behind computation."""
    data_overlap: float = option(0.5)
    """Share of data-parallel communication that is hidden behind computation at ZeRO 3. DeepSpeed
    hides nothing below it, where its overlap_comm is off by default."""

    def check(self) -> None:
        """Raises ConfigError for a value that makes no sense."""
        if self.gpus is None:
            raise ConfigError("--gpus is missing, the number of GPUs to plan for")
        for name in ("gpus", "gpus_per_node", "peak_tflops", "intra_node_bandwidth",
                     "inter_node_bandwidth"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)} must be positive")
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"--utilisation {self.utilisation} must be above 0 and at most 1")
        for name in ("tensor_overlap", "pipeline_overlap", "data_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)} must be from 0 to 1")
        if self.usable_memory <= 0:
            raise ConfigError(
                f"--memory-reserve {self.memory_reserve} leaves nothing of --gpu-memory "
                f"{self.gpu_memory}"
            )

    @property
    def usable_memory(self) -> int:
        """Bytes of a GPU that a plan may use."""
        memory = parse_bytes("--gpu-memory", self.gpu_memory)
        return memory - parse_bytes("--memory-reserve", self.memory_reserve)

    def ring_bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second at which a group's rings pass each of its GPUs.

        In a node that is the GPU's own; between nodes the links of all members in a node carry the
        rings of each of them, as NCCL builds them.

        Args:
            ranks: members of the group.
            stride: from one member to the next, in the order of ranks.
        """
        inside = self.intra_node_bandwidth
        if ranks * stride <= self.gpus_per_node:
            return 1e9 * inside
        members = max(1, self.gpus_per_node // stride)
        return 1e9 * min(inside, members * self.inter_node_bandwidth)

    def link_bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second from one GPU of a group to the next, at its slowest place."""
        inside = ranks * stride <= self.gpus_per_node
        return 1e9 * (self.intra_node_bandwidth if inside else self.inter_node_bandwidth)

    @property
    def flops(self) -> float:
        """FLOP/s that a GPU reaches while it computes."""
        return self.peak_tflops * 1e12 * self.utilisation


def parse_bytes(flag: str, text: str) -> int:
    """Bytes of a size such as ``80GiB``.

    Raises:
        ConfigError: it is no such size; the message names ``flag``.
    """
    found = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(_UNITS)})", text)
    if found is None:
        raise ConfigError(f"{flag} {text} is no size; write it like 80GiB ({', '.join(_UNITS)})")
    return int(float(found[1]) * _UNITS[found[2]])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
