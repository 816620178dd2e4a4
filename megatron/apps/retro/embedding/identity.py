"""What the vectors of a model depend on, in short."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.util.digests import digest_of_parts


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Of weights by name, in the dtype that they are used in, whatever their order."""
    parts: list[str | memoryview] = []
    for name, weight in sorted(weights, key=lambda item: item[0]):
        flat = weight.detach().cpu().contiguous().view(-1)
        parts.append(f"{name} {weight.dtype} {tuple(weight.shape)}")
        parts.append(flat.view(torch.uint8).numpy().data)
    return digest_of_parts(parts)
