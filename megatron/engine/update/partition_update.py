"""Optimizer update for ZeRO 1 and 2, on slices of a rank's partition of the weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.engine.update.adam import (
    BLOCK,
    ElementwiseAdam,
    Float32States,
    FusedAdam,
    StateFormat,
)
from megatron.kernels.compiler import missing_compiler

LEAST = 2**16
"""Minimum number of elements of a gradient that gets a kernel of its own. Smaller gradients are
collected in a buffer, many per kernel."""


_MOST_COMPILED = 2**26
"""Maximum number of elements in a slice. Limits the memory for a kernel's intermediate values, such
as moments before they are encoded in 8 bits."""

_MOST_COPIED = 2**24
"""Maximum number of elements in a slice that is copied, or whose gradients are."""

_MOST_IN_CACHE = 2**18
"""Maximum number of elements per CPU thread, so that the copy stays in the core's cache."""


class Part(NamedTuple):
    """Range of ``length`` elements from ``start`` in the partition's gradient with this index."""

    gradient: int
    start: int
    length: int


class PartitionSlice(NamedTuple):
    """Range of a partition that is updated at once. ``parts`` are its gradients in order; padding
    may follow."""

    start: int
    length: int
    parts: tuple[Part, ...]

    @property
    def whole(self) -> bool:
        """True if all of the slice's gradients are in one tensor."""
        return len(self.parts) == 1 and self.parts[0].length == self.length


def cut(sizes: Sequence[int], length: int, least: int, most: int) -> list[PartitionSlice]:
    """Cut a partition of ``length`` elements into slices of at most ``most``, all of which but the
    last are whole blocks. ``sizes`` are the sizes of its gradients; padding follows. At least
    ``least`` consecutive elements of one gradient get slices of their own."""
    ends = list(accumulate(sizes, initial=0))
    cuts = {0, length, _down(length)}
    for start, end in pairwise(ends):
        first, last = -_down(-start), _down(end)
        if last - first >= least:
            cuts |= {first, last}
    edges = sorted(cuts)
    return [
        PartitionSlice(at, min(most, end - at), tuple(_parts(ends, at, min(at + most, end))))
        for start, end in pairwise(edges)
        for at in range(start, end, most)
    ]


def _down(number: int) -> int:
    return number // BLOCK * BLOCK


def _parts(ends: list[int], start: int, end: int) -> Iterator[Part]:
    for gradient in range(bisect_right(ends, start) - 1, len(ends) - 1):
        first, last = ends[gradient], ends[gradient + 1]
        if first >= end:
            return
        begin, stop = max(start, first), min(end, last)
        if begin < stop:
            yield Part(gradient, begin - first, stop - begin)


def partition_update(
    wrapper: Any,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    form: StateFormat | None = None,
) -> PartitionUpdate:
    """Return the update for DeepSpeed's ZeRO 1 or 2 optimizer ``wrapper`` around an AdamW. ``form``
    is None for float32."""
    betas, eps = optimizer.defaults["betas"], optimizer.defaults["eps"]
    compiled = device.type == "cuda" and not missing_compiler(device.type)
    kernel: ElementwiseAdam | FusedAdam = FusedAdam(betas, eps)
    states = Float32States() if form is None else form
    if compiled or form is not None:
        kernel = ElementwiseAdam(states, betas, eps, compiled)
    most = _MOST_IN_CACHE * torch.get_num_threads() if device.type == "cpu" else _MOST_COPIED
    if compiled:
        most = _MOST_COMPILED
    return PartitionUpdate(wrapper, optimizer, states, kernel, most)


class PartitionUpdate:
    """Replaces the step of DeepSpeed's ZeRO 1 and 2 optimizer: Adam without a float32 copy of all
    gradients, followed by an all-gather of the ranks' weights.

    Args:
        wrapper: DeepSpeed's optimizer around ``optimizer``.
        form: how main weights and moments are stored.
        kernel: updates a slice.
        most: the maximum number of elements in a slice.
    """

    def __init__(
        self,
        wrapper: Any,
        optimizer: torch.optim.Optimizer,
        form: StateFormat,
        kernel: ElementwiseAdam | FusedAdam,
        most: int,
    ) -> None:
        self._wrapper, self._optimizer = wrapper, optimizer
        self._form, self._kernel, self._most = form, kernel, most
        self._pieces: dict[int, list[PartitionSlice]] = {}
        self._elements: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def step(self, factor: Tensor | None, held: Tensor) -> None:
        """Update the weights with the gradients times ``factor`` (None for 1), or change nothing if
        ``held`` is 1. The arguments are float32 scalars on the device."""
        wrapper = self._wrapper
        wrapper.await_weights()  # for layers that have not run since the last gather
        for number in wrapper.order_of_use:
            main = wrapper.single_partition_of_fp32_groups[number]
            self._update(number, main, factor, held)
            # The gather overlaps with the update of the next groups.
            wrapper.start_gather(number)
            wrapper.averaged_gradients[number] = None
            for param in wrapper.bit16_groups[number]:
                param.grad = None
        wrapper._lazy_init_hp_params_optimizer_state()
        if not wrapper.gathers_late:
            wrapper.await_weights()

    def _update(self, number: int, main: Tensor, factor: Tensor | None, held: Tensor) -> None:
        wrapper, state = self._wrapper, self._optimizer.state[main]
        group = self._optimizer.param_groups[number]
        if "step" not in state:
            state.update(self._form.create(main), step=held.new_zeros(()))
        model = wrapper.own_part(number)
        grads = self._gradients(number)
        if number not in self._pieces:
            self._prepare(number, grads, model)
        pieces = self._pieces[number]
        dtype = self._kernel.gradient_dtype(grads[0].dtype)
        collected = [p.length for p in pieces if not p.whole or grads[0].dtype != dtype]
        buffer = torch.empty(max(collected, default=0), dtype=dtype, device=model.device)
        stored = self._form.tensors(model, main.detach(), state)
        slices = zip(*(_slices(tensor, pieces, model.numel()) for tensor in stored), strict=True)
        state["step"].add_(1)
        update = self._kernel.of_group(group, state["step"], factor, held)
        for piece, elements, tensors in zip(pieces, self._elements[number], slices, strict=True):
            update(_collect(piece, grads, buffer), elements, tensors)
        state["step"].sub_(held)

    def _gradients(self, number: int) -> list[Tensor]:
        grads = self._wrapper.averaged_gradients[number]
        flat = getattr(grads, "flat_partition", None)
        if flat is not None and self._form.keys is None:
            return [flat.view(-1)]
        return [grad.reshape(-1) for grad in grads]

    def _prepare(self, number: int, grads: list[Tensor], model: Tensor) -> None:
        sizes = [grad.numel() for grad in grads]
        self._pieces[number] = pieces = cut(sizes, model.numel(), LEAST, self._most)
        # Stored scales, one per block, are cut together with the slices.
        assert self._form.keys is None or all(piece.start % BLOCK == 0 for piece in pieces)
        if self._form.keys is None:
            self._elements[number] = [model.new_zeros((), dtype=torch.int32)] * len(pieces)
        else:
            firsts = list(self._firsts(number, self._form.keys))
            self._elements[number] = [_elements(piece, firsts, model.device) for piece in pieces]

    def _firsts(self, number: int, keys: Mapping[nn.Parameter, int]) -> Iterator[int]:
        """Yield the identifier of the first element of each gradient; 0 for padding."""
        params = iter(self._wrapper.params_in_partition[number])
        skipped = self._wrapper.first_offset[number]
        for grad in self._wrapper.averaged_gradients[number]:
            param = None if getattr(grad, "_zero_padding", False) else next(params, None)
            yield 0 if param is None else keys[param] + skipped
            skipped = 0


def _slices(tensor: Tensor, pieces: Sequence[PartitionSlice], length: int) -> Sequence[Tensor]:
    """Return the slices of a tensor with one value per element or per block of a partition."""
    if tensor.numel() == length:
        return tensor.split([piece.length for piece in pieces])
    return tensor.split([-(-piece.length // BLOCK) for piece in pieces])


def wrapped(number: int) -> int:
    """Return the lowest 32 bits of a number as an int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _elements(piece: PartitionSlice, firsts: Sequence[int], device: torch.device) -> Tensor:
    """Return the identifiers of a slice's elements, as :meth:`StateFormat.encode` gets them.
    ``firsts`` has the identifier of each gradient's first element."""
    begins = [firsts[part.gradient] + part.start for part in piece.parts]
    if piece.whole:
        return torch.full((), wrapped(begins[0]), dtype=torch.int32, device=device)
    numbers = torch.zeros(piece.length, dtype=torch.int32, device=device)
    place = 0
    for part, begin in zip(piece.parts, begins, strict=True):
        # Counted in int64, and truncated to the lower 32 bits.
        counted = torch.arange(begin, begin + part.length, device=device)
        numbers[place : place + part.length] = counted.to(torch.int32)
        place += part.length
    return numbers


def _collect(piece: PartitionSlice, grads: Sequence[Tensor], buffer: Tensor) -> Tensor:
    """Return a slice's gradients in the buffer's dtype. They are copied only if necessary."""
    parts = [grads[part.gradient].narrow(0, part.start, part.length) for part in piece.parts]
    if piece.whole and parts[0].dtype == buffer.dtype:
        return parts[0]
    result = buffer[: piece.length]
    *places, padding = result.split([*(p.length for p in piece.parts), _padding(piece)])
    if parts:
        torch._foreach_copy_(places, parts)
    padding.zero_()
    return result


def _padding(piece: PartitionSlice) -> int:
    return piece.length - sum(part.length for part in piece.parts)
