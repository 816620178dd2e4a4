"""Bytes of memory that tensors hold, counted by torch's operators, not by the code under test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators made inside and that are still there.

    Attributes:
        peak: the most after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {StorageWeakRef(x.untyped_storage()) for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)
            if ref not in before:
                self._live[ref] = len(storage)
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes that are there now, but for the storages of some tensors."""
        left_out = {StorageWeakRef(x.untyped_storage()) for x in without}
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        return sum(size for ref, size in self._live.items() if ref not in left_out)


def _tensors(tree: object) -> list[Tensor]:
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    ]
