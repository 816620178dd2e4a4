"""Average, global norm and clipping of gradients, by the shard descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.mesh import SHARDED, Group, Mesh
from megatron.parallel.shard import shard_of

_ROW = 1024
"""Number of squares that are summed in float32, on CPUs; sums of rows are in float64."""

_ROWS = 256
"""Rows per call."""


def owned(param: nn.Parameter, mesh: Mesh, among: Sequence[str]) -> bool:
    """Whether this rank's copy of a parameter counts in the norm of the gradients and in
    checkpoints. Only one copy counts along the axes ``among``: ``SHARDED`` for sums over the ranks
    of one replica, ``MODEL`` where each replica has its own part, ``AXES`` for one of all ranks."""
    # DeepSpeed marks the copies of tied parameters on pipeline stages after the first.
    replicated = getattr(param, "ds_pipe_replicated", False)
    return not replicated and shard_of(param).counted(mesh.coordinates, among)


@torch.no_grad()
def average_gradients(params: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Averages gradients over all replicas, in place. Each is summed over the axes along which its
    parameter is replicated; the gradient of a parameter that is cut over ``expert`` already
    includes the tokens of other ranks along it."""
    for param in params:
        if param.grad is not None and mesh.data.size > 1:
            group = mesh.group(*shard_of(param).reduced)
            if group.size > 1:
                dist.all_reduce(param.grad, group=group.handle)
            param.grad /= mesh.data.size


@torch.no_grad()
def gradient_norm(params: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """2-norm over all gradients of the whole model, each counted once (float32, or float64 for
    float64 gradients). ``params`` are all of this rank, gradients averaged over the replicas."""
    dtypes = {param.grad.dtype for param in params if param.grad is not None}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    grads = [p.grad for p in params if p.grad is not None and owned(p, mesh, SHARDED)]
    return norm_of_groups([grads], wide, wide, [mesh.group(*SHARDED)], params[0].device)


@torch.no_grad()
def norm_of_groups(
    grads: Sequence[Sequence[Tensor]],
    sums: torch.dtype,
    result: torch.dtype,
    groups: Sequence[Group],
    device: torch.device,
) -> Tensor:
    """2-norm over groups of gradients, without copies in another dtype; not finite where any
    gradient is not.

    Args:
        sums: dtype in which a gradient's squares are summed.
        result: dtype of the numbers that travel between ranks, and of the norm.
        groups: ranks with different gradients; sums are added over one group after the other.
    """
    squares_G = torch.stack([_sum_of_squares(part, sums, device) for part in grads]).to(result)
    for group in groups:
        if group.size > 1:
            dist.all_reduce(squares_G, group=group.handle)
    return torch.linalg.vector_norm(squares_G.sqrt())


def _sum_of_squares(grads: Sequence[Tensor], sums: torch.dtype, device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu" and sums == torch.float32:
        norms = torch.cat([part for grad in grads for part in _norms_of_rows(grad)])
    else:
        norms = torch.stack(torch._foreach_norm(list(grads), 2, dtype=sums))
    return norms.to(torch.float64).pow(2).sum()


def _norms_of_rows(grad: Tensor) -> list[Tensor]:
    """torch sums the squares of a whole CPU tensor sequentially: in float32 a million of them lose
    four digits, and float64 takes three times as long. A row at a time loses nothing relevant."""
    flat = grad.reshape(-1)
    end = flat.numel() // _ROW * _ROW
    # torch copies 16-bit numbers to float32 first: parts that stay in a core's cache.
    parts = [*flat[:end].view(-1, _ROW).split(_ROWS), flat[end:].view(1, -1)]
    return [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts if part.numel()
    ]


def clipping_factor(norm: Tensor, largest: float) -> Tensor:
    """Factor of gradients that makes their norm at most ``largest``."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)
