"""Bytes of tensors that exist at once in a step, for comparison with plans."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the storages that operators make, while they exist; those of ``on_host`` apart."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, bool]] = {}
        self.device = self.host = self.peak = self.host_peak = 0
        self.making_host = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.alive or not storage.nbytes():
            return
        self.alive[key] = storage.nbytes(), self.making_host
        weakref.finalize(storage, self._remove, key)
        self._count(storage.nbytes(), self.making_host)

    def _remove(self, key: int) -> None:
        size, on_host = self.alive.pop(key)
        self._count(-size, on_host)

    def _count(self, size: int, on_host: bool) -> None:
        if on_host:
            self.host += size
        else:
            self.device += size
        self.peak = max(self.peak, self.device)
        self.host_peak = max(self.host_peak, self.host)

    @contextmanager
    def on_host(self):
        """What is made inside counts as host memory."""
        before, self.making_host = self.making_host, True
        try:
            yield
        finally:
            self.making_host = before

    @contextmanager
    def host_copies(self):
        """Copies of the feature of long contexts count as host memory."""
        from megatron.features.context import host, offload

        def apart(function):
            def call(*args, **kwargs):
                with self.on_host():
                    return function(*args, **kwargs)

            return call

        with (
            mock.patch.object(offload.HostCopy, "__init__", apart(offload.HostCopy.__init__)),
            mock.patch.object(host, "_to_host", apart(host._to_host)),
        ):
            yield
