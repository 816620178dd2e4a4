"""Partitioning of the inputs of recomputed layers across tensor-parallel ranks.

Without sequence parallelism all tensor-parallel ranks have the same input. Each keeps a slice of
the flattened elements, and the backward pass gathers the whole. The result is bitwise equal, and
costs one more collective (``--partition-activations``; Rajbhandari et al. 2020, arXiv:1910.02054,
section 6.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.parallel.collectives import all_gather_flat
from megatron.parallel.mesh import Group


class _Part(NamedTuple):
    """This rank's slice of a tensor of shape ``shape``, as packed by the inner hook."""

    kept: Any
    shape: torch.Size


class DividedInputs:
    """Hooks of saved tensors (``torch.autograd.graph.saved_tensors_hooks``) that keep only this
    rank's slice of the flattened elements, and gather the whole tensor when it is unpacked.

    Args:
        ranks: ranks with the same tensors, which must all unpack them in the same order.
    """

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._parts: WeakValueDictionary[tuple[Any, ...], Tensor] = WeakValueDictionary()

    def around(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return a pack and an unpack hook, which pass this rank's slice to ``pack`` and
        ``unpack``. Tensors that cannot be divided evenly are kept whole."""

        def pack_part(x: Tensor) -> Any:
            even = x.is_floating_point() and x.numel() and x.numel() % self._ranks.size == 0
            return _Part(pack(self._part(x)), x.shape) if even else pack(x)

        def unpack_whole(kept: Any) -> Tensor:
            if not isinstance(kept, _Part):
                return unpack(kept)
            part = unpack(kept.kept)
            whole = part.new_empty(part.numel() * self._ranks.size)
            all_gather_flat(whole, part, group=self._ranks.handle)
            return whole.view(kept.shape)

        return pack_part, unpack_whole

    def _part(self, x: Tensor) -> Tensor:
        """Return this rank's slice. Layers that save the same tensor, such as an encoder's output,
        share it."""
        place = x.storage_offset(), x.shape, x.stride(), x.dtype
        key = StorageWeakRef(x.untyped_storage()), x._version, *place
        part = self._parts.get(key)
        if part is None:
            parts = x.detach().reshape(self._ranks.size, -1)
            part = self._parts[key] = parts[self._ranks.rank].clone()
        return part
