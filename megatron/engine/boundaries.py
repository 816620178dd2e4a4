"""What crosses the boundaries between pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.layer_list import LayerState
from megatron.parallel.mesh import Group

_COMPUTED = ("hidden", "encoder")


class Boundary(NamedTuple):
    """The tensors that cross one boundary, in the order in which they are sent.

    Attributes:
        names: fields of the state, or losses.
        shapes: of each.
        dtypes: of each.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> Boundary:
        """That of tensors of these shapes; ``dtype`` is that of hidden states. Losses have at least
        32 bits."""
        of_losses = torch.promote_types(dtype, torch.float32)
        return cls(
            tuple(shapes),
            tuple(tuple(shape) for shape in shapes.values()),
            tuple(dtype if name in _COMPUTED else of_losses for name in shapes),
        )

    def taken_from(self, state: LayerState) -> tuple[Tensor, ...]:
        """The tensors of a state that cross."""
        found = tuple(
            getattr(state, name) if name in _COMPUTED else state.losses[name] for name in self.names
        )
        for name, tensor, shape, dtype in zip(*self[:1], found, *self[1:], strict=True):
            has = tuple(tensor.shape), tensor.dtype
            assert has == (shape, dtype), f"{name} is {has} between stages, not {shape, dtype}"
        return found

    def put_into(self, state: LayerState, tensors: Sequence[Tensor]) -> LayerState:
        """The state with those that have crossed."""
        found = dict(zip(self.names, tensors, strict=True))
        hidden, encoder = found.pop("hidden"), found.pop("encoder", state.encoder)
        return state._replace(hidden=hidden, encoder=encoder, losses={**state.losses, **found})

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Memory for them."""
        return tuple(
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def check_agreement(boundaries: Sequence[Boundary], pipeline: Group) -> None:
    """Compares the boundaries that the ranks of a pipeline have derived, each by itself. Every rank
    must call it.

    Raises:
        AssertionError: two ranks differ; where, and what each has.
    """
    if pipeline.size == 1:
        return
    found: list[Sequence[Boundary]] = [()] * pipeline.size
    dist.all_gather_object(found, tuple(boundaries), group=pipeline.handle)
    for stage, ours in enumerate(zip(*found, strict=True)):
        for rank, theirs in enumerate(ours):
            assert theirs == ours[0], (
                f"between pipeline stages {stage} and {stage + 1} rank 0 of the pipeline expects "
                f"{ours[0]}, rank {rank} {theirs}"
            )
