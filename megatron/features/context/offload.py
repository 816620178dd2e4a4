"""Offloading of activations to host memory between the forward and the backward pass.

The activations that a group of layers saves for the backward pass are copied to the host while
later layers are computed. They are copied back during the backward pass of the layers after the
group. On a GPU the copies run on a separate stream, and the activations of at most two groups are
on the device in addition to those of the current one. On a CPU the copies stay in the same memory.

A storage is copied only once, even if several tensors share it. Parameters are not copied but
looked up again in the backward pass, so that ZeRO 3 can free and gather them in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.features.context.partition import DividedInputs
from megatron.model.layer_list import LayerSequence, LayerState, RecomputedLayers, Step

SMALLEST = 2**16
"""Minimum size in bytes of a storage to offload. For smaller ones the calls cost too much."""


class _View(NamedTuple):
    """Saved tensor as a view: of a parameter, with an offset from its first element, or of a host
    copy, which is restored together with the other copies of ``group``."""

    of: nn.Parameter | HostCopy
    group: SavedGroup
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Run the enclosed copies on a separate stream, after everything queued on the current one.
    Yields None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


class HostCopy:
    """Copy of a storage in host memory, which is copied back to the device when needed.

    Attributes:
        host: the bytes in host memory, uint8, pinned if the device is a GPU.
        bytes: the bytes on the device; None while they are only in host memory.
    """

    bytes: Tensor | None = None
    _arrival: torch.cuda.Event | None = None

    def __init__(self, storage: torch.UntypedStorage, group: SavedGroup) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        pinned = storage.device.type == "cuda"
        self.host = torch.empty(len(whole), dtype=torch.uint8, pin_memory=pinned)
        with side_stream(storage.device) as stream:
            self.host.copy_(whole, non_blocking=True)
        if stream is not None:
            # The storage must not be reused before the copy is complete.
            group.leaving.append((storage, stream.record_event()))

    def fetch(self, device: torch.device) -> None:
        """Start the copy back to the device, unless it has already been started."""
        if self.bytes is not None:
            return
        if device.type == "cpu":
            self.bytes = self.host
            return
        # The memory is allocated on the current stream, so the copy waits for its earlier users.
        self.bytes = torch.empty_like(self.host, device=device)
        with side_stream(device) as stream:
            self.bytes.copy_(self.host, non_blocking=True)
        assert stream is not None
        # The memory may be freed before it is used, if the tensor is not needed after all.
        self.bytes.record_stream(stream)
        self._arrival = stream.record_event()

    def arrived(self, device: torch.device) -> torch.UntypedStorage:
        """Return the storage on the device. Work queued next on the current stream may use it."""
        assert self.bytes is not None
        if self._arrival is not None:
            torch.cuda.current_stream(device).wait_event(self._arrival)
        return self.bytes.untyped_storage()


class SavedGroup:
    """Host copies of the activations that consecutive layers save in one forward pass. ``before``
    is the group whose backward pass comes next."""

    def __init__(self, device: torch.device, before: SavedGroup | None) -> None:
        self.device, self.before = device, before
        self.copies: WeakSet[HostCopy] = WeakSet()
        self.leaving: list[tuple[torch.UntypedStorage, torch.cuda.Event]] = []

    def release(self) -> None:
        """Free the activations on the device once they are copied, which the current stream waits
        for."""
        if self.leaving:
            torch.cuda.current_stream(self.device).wait_event(self.leaving[-1][1])
        self.leaving = []

    def fetch(self) -> None:
        """Start copying all activations that are still needed back to the device."""
        self.release()
        for copy in self.copies:
            copy.fetch(self.device)


class Offload:
    """Host copies of the activations that one sequence of layers saves for the backward pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._group: SavedGroup | None = None
        self._params: Sequence[nn.Parameter] = ()
        self.copies: WeakValueDictionary[tuple[StorageWeakRef, int], HostCopy] = (
            WeakValueDictionary()
        )

    def saving(
        self,
        params: Sequence[nn.Parameter],
        first: bool,
        divided: DividedInputs | None = None,
        on_host: bool = True,
    ) -> AbstractContextManager[Any]:
        """Return a context manager for the forward pass of the next group of layers, whose
        parameters are ``params``. With ``on_host``, tensors saved for the backward pass are moved
        to host memory. ``divided``, if given, first reduces each to this rank's partition.
        ``first`` marks the first group of a forward pass."""
        if not torch.is_grad_enabled():
            return nullcontext()
        before = None if first else self._group
        if self._group is not None:
            self._group.release()
        self._group = SavedGroup(self.device, before)
        self._params = params
        pack = partial(self._pack, self._group) if on_host else _as_it_is
        if divided is None:
            return saved_tensors_hooks(pack, _unpack)
        return saved_tensors_hooks(*divided.around(pack, _unpack))

    def _pack(self, group: SavedGroup, x: Tensor) -> Tensor | _View:
        plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
        if not plain or x.device.type != self.device.type or not x.numel():
            return x
        start = x.data_ptr()
        for param in self._params:
            inside = start - param.data_ptr()
            if 0 <= inside < param.numel() * param.element_size() and param.dtype == x.dtype:
                offset = inside // x.element_size()
                return _View(param, group, x.dtype, x.size(), x.stride(), offset)
        storage = x.untyped_storage()
        if len(storage) < SMALLEST:
            return x
        # The weak reference guards against reuse of a freed address; the version identifies
        # contents.
        key = StorageWeakRef(storage), x._version
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = HostCopy(storage, group)
        group.copies.add(copy)
        return _View(copy, group, x.dtype, x.size(), x.stride(), int(x.storage_offset()))


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    of, group, dtype, size, stride, offset = packed
    if isinstance(of, nn.Parameter):
        return of.detach().as_strided(size, stride, of.storage_offset() + offset)
    group.fetch()
    if group.before is not None:
        group.before.fetch()
    memory = of.arrived(group.device)
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, size, stride)


class _OffloadedLayers(RecomputedLayers):
    """Recomputed layers whose saved input is in host memory, or partitioned across ranks."""

    saving: Callable[[], AbstractContextManager[Any]]

    def __call__(self, state: LayerState) -> LayerState:
        with self.saving():
            return super().__call__(state)


def offload(
    sequences: Sequence[LayerSequence],
    device: torch.device,
    blocks: int,
    inputs: bool,
    divided: DividedInputs | None = None,
) -> list[Offload]:
    """Offload tensors that layers save for the backward pass to host memory. Edits ``sequences``.

    Args:
        blocks: number of blocks per sequence of layers to offload, starting with the first ones
            that are not recomputed.
        inputs: whether to keep the inputs of recomputed layers in host memory, too.
        divided: hooks that partition these inputs across ranks, in host or device memory.
    """
    offloads = []
    for sequence in sequences:
        offload, first, left = Offload(device), True, blocks
        for place, (index, step) in enumerate(sequence.steps):
            block = _module_of(step)
            if (inputs or divided) and isinstance(step, RecomputedLayers):
                layers = _OffloadedLayers(step.steps, step.blocks)
                layers.saving = partial(offload.saving, (), first, divided, inputs)
                sequence.steps[place] = index, layers
            elif left and index is not None and any(block is each for each in sequence.blocks):
                saving = partial(offload.saving, list(block.parameters()), first)
                sequence.steps[place] = index, partial(_saved, step, saving)
                left -= 1
            else:
                continue
            first = False
        offloads.append(offload)
    return offloads


def _saved(
    step: Step, saving: Callable[[], AbstractContextManager[Any]], state: LayerState
) -> LayerState:
    with saving():
        return step(state)


def _module_of(step: Any) -> Any:
    while isinstance(step, partial):
        step = step.args[0]
    return step
