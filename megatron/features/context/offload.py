"""Activations in host memory between the forward and the backward pass.

What the blocks of a group save for the backward pass is copied to the host while later blocks are
computed, and comes back while the block after it is in its backward pass: on a GPU a stream of its
own copies, and the activations of at most two groups are on the device next to those of the current
one. On a CPU the same copies are made, within one memory.

A storage is copied once, however many tensors share it. Parameters are not copied: they are looked
up again in the backward pass, so that ZeRO 3 may free and gather them in between.
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
"""Bytes of the smallest storage that is copied: one of fewer costs more in calls than in memory."""


class _View(NamedTuple):
    """A tensor as a view of memory: of a parameter, from its first element, or of a copy that is
    restored with the others in ``group``."""

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
    """Run the enclosed copies on a separate stream, after everything queued on the current one;
    None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


class HostCopy:
    """A storage in host memory, and again on the device once it is needed there.

    Attributes:
        host: its bytes, uint8, in pinned memory where the device is a GPU.
        bytes: its bytes on the device; None while they are on the host only.
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
            # Its memory must not be used again before the copy.
            group.leaving.append((storage, stream.record_event()))

    def fetch(self, device: torch.device) -> None:
        """Start the copy back to the device, unless it was started."""
        if self.bytes is not None:
            return
        if device.type == "cpu":
            self.bytes = self.host
            return
        # Its memory belongs to the current stream: the copy waits for its earlier users.
        self.bytes = torch.empty_like(self.host, device=device)
        with side_stream(device) as stream:
            self.bytes.copy_(self.host, non_blocking=True)
        assert stream is not None
        # It may be freed before it is used, if its tensor is not needed after all.
        self.bytes.record_stream(stream)
        self._arrival = stream.record_event()

    def arrived(self, device: torch.device) -> torch.UntypedStorage:
        """The storage on the device, for what is queued on the current stream."""
        assert self.bytes is not None
        if self._arrival is not None:
            torch.cuda.current_stream(device).wait_event(self._arrival)
        return self.bytes.untyped_storage()


class SavedGroup:
    """The copies of what consecutive layers save in one forward pass; ``before`` is the group
    whose backward pass comes next."""

    def __init__(self, device: torch.device, before: SavedGroup | None) -> None:
        self.device, self.before = device, before
        self.copies: WeakSet[HostCopy] = WeakSet()
        self.leaving: list[tuple[torch.UntypedStorage, torch.cuda.Event]] = []

    def release(self) -> None:
        """Free the activations on the device: what is queued later waits for their copies."""
        if self.leaving:
            torch.cuda.current_stream(self.device).wait_event(self.leaving[-1][1])
        self.leaving = []

    def fetch(self) -> None:
        """Start copies back to the device of all that is needed yet."""
        self.release()
        for copy in self.copies:
            copy.fetch(self.device)


class Offload:
    """Copies of what layers save, for one sequence of layers."""

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
        """Return a context for the next group of layers, which have ``params``: tensors saved for
        their backward pass, or the parts that ``divided`` keeps, go to the host. ``first`` marks
        the first group of a forward pass."""
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
        # A weak reference keeps the address of a freed storage from being used again; the version
        # tells what is in it.
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
    """Recomputed layers whose first input is on the host, or divided."""

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
    """Keep tensors that layers save for the backward pass on the host.

    Args:
        blocks: number of blocks of each sequence, the first ones that are not recomputed.
        inputs: True to keep the inputs of recomputed layers there.
        divided: keeps a part of these inputs, there or on the device.
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
