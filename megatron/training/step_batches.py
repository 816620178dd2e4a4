"""The micro batches of a step of instruction data: of one length where a pipeline needs that, with
their weights in the loss of the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Mesh
from megatron.training.trainer import StepCounts


def weighed_step(
    batches: Iterator[Any], count: int, mesh: Mesh, device: torch.device
) -> tuple[Iterator[Any], StepCounts]:
    """The next ``count`` micro batches of this data-parallel rank, whose weights are relative to
    their mean over those of all ranks; does not wait for the device."""
    step = [next(batches) for _ in range(count)]
    if mesh.pipeline.size > 1:
        step = of_one_length(step)
    fed = sum(batch.tokens_BS.numel() for batch in step)
    weights = [batch.weights_2.to(device, non_blocking=True) for batch in step]
    # Filled on the device: a copy from the CPU would wait for it.
    sums_3 = torch.full((3,), float(fed), dtype=torch.float64, device=device)
    sums_3[1:] = torch.stack(weights).sum(0)
    if mesh.data.size > 1:
        dist.all_reduce(sums_3, group=mesh.data.handle)
    means_2 = (sums_3[1:] / (count * mesh.data.size)).clamp(min=torch.finfo(torch.float64).tiny)
    relative = (
        batch._replace(weights_2=own / means_2) for batch, own in zip(step, weights, strict=True)
    )
    return relative, StepCounts(sums_3[0], sums_3[2])


def of_one_length(batches: list[Any]) -> list[Any]:
    """The batches, padded to the longest."""
    longest = max(batch.tokens_BS.shape[1] for batch in batches)
    return [batch.lengthened(longest) for batch in batches]
