"""The update of ZeRO 1 and 2: a rank's partition of the weights, a slice at a time."""

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
"""Number of elements of one gradient that justify a separate kernel. Others are collected in a
buffer, many to a kernel."""


_MOST_COMPILED = 2**26
"""Largest number of elements in a slice, so that what a kernel may have to keep of it, the moments
before they are encoded in 8 bits, takes little memory."""

_MOST_COPIED = 2**24
"""The same where a slice, or its gradients, are copied."""

_MOST_IN_CACHE = 2**18
"""The same for each thread of a CPU: the copy stays in its cache."""


class Part(NamedTuple):
    """``length`` elements of a gradient (by its index in the partition), from ``start``."""

    gradient: int
    start: int
    length: int


class PartitionSlice(NamedTuple):
    """A range of a partition that is updated at once; ``parts`` are its gradients in order, the
    rest is padding."""

    start: int
    length: int
    parts: tuple[Part, ...]

    @property
    def whole(self) -> bool:
        """True if its gradients are a part of one tensor."""
        return len(self.parts) == 1 and self.parts[0].length == self.length


def cut(sizes: Sequence[int], length: int, least: int, most: int) -> list[PartitionSlice]:
    """Cuts a partition of ``length`` elements into pieces of at most ``most``, all of whole blocks
    but the last. ``sizes`` are those of its gradients; padding follows. Runs of ``least`` and more
    elements of one gradient have pieces of their own."""
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
    ranks: Sequence[int],
    device: torch.device,
    form: StateFormat,
    keys: Mapping[nn.Parameter, int],
) -> PartitionUpdate:
    """The update for DeepSpeed's optimizer ``wrapper`` of stage 1 or 2 around an AdamW; for the
    other arguments see :class:`PartitionUpdate`."""
    betas, eps = optimizer.defaults["betas"], optimizer.defaults["eps"]
    compiled = device.type == "cuda" and not missing_compiler(device.type)
    kernel: ElementwiseAdam | FusedAdam = FusedAdam(betas, eps)
    if compiled or not isinstance(form, Float32States):
        kernel = ElementwiseAdam(form, betas, eps, compiled)
    most = _MOST_IN_CACHE * torch.get_num_threads() if device.type == "cpu" else _MOST_COPIED
    if compiled:
        most = _MOST_COMPILED
    random = None if isinstance(form, Float32States) else keys
    return PartitionUpdate(wrapper, optimizer, ranks, form, kernel, most, random)


class PartitionUpdate:
    """Replaces ``step`` of DeepSpeed's optimizer of stages 1 and 2: Adam without a copy of all
    gradients in float32; afterwards the ranks' weights are gathered.

    Args:
        wrapper: DeepSpeed's optimizer around ``optimizer``.
        ranks: of this process among those that share each group of parameters.
        form: how main weights and moments are stored.
        kernel: updates a slice.
        most: the largest number of elements in a slice.
        keys: the identifier of the first element of each parameter's share, for random bits; None
            where the format needs none.
    """

    def __init__(
        self,
        wrapper: Any,
        optimizer: torch.optim.Optimizer,
        ranks: Sequence[int],
        form: StateFormat,
        kernel: ElementwiseAdam | FusedAdam,
        most: int,
        keys: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        self._wrapper, self._optimizer, self._ranks = wrapper, optimizer, ranks
        self._form, self._kernel, self._most = form, kernel, most
        self._keys = keys
        self._pieces: dict[int, list[PartitionSlice]] = {}
        self._elements: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def step(self, factor: Tensor | None, held: Tensor) -> None:
        """Updates with the gradients times ``factor``, or nothing where ``held`` is 1; both float32
        on the device."""
        wrapper = self._wrapper
        wrapper.await_weights()  # of layers that have not run
        for number in wrapper.order_of_use:
            main = wrapper.single_partition_of_fp32_groups[number]
            self._update(number, main, factor, held)
            # While the next ones are updated.
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
        model = wrapper.parallel_partitioned_bit16_groups[number][self._ranks[number]]
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
        if flat is not None and self._keys is None:
            return [flat.view(-1)]
        return [grad.reshape(-1) for grad in grads]

    def _prepare(self, number: int, grads: list[Tensor], model: Tensor) -> None:
        sizes = [grad.numel() for grad in grads]
        self._pieces[number] = pieces = cut(sizes, model.numel(), LEAST, self._most)
        # Stored scales are cut with the slices: one for each block.
        assert self._keys is None or all(piece.start % BLOCK == 0 for piece in pieces)
        if self._keys is None:
            self._elements[number] = [model.new_zeros((), dtype=torch.int32)] * len(pieces)
        else:
            firsts = list(self._firsts(number, self._keys))
            self._elements[number] = [_elements(piece, firsts, model.device) for piece in pieces]

    def _firsts(self, number: int, keys: Mapping[nn.Parameter, int]) -> Iterator[int]:
        """The identifier of each gradient's first element; 0 for padding."""
        params = iter(self._wrapper.params_in_partition[number])
        skipped = self._wrapper.first_offset[number]
        for grad in self._wrapper.averaged_gradients[number]:
            param = None if getattr(grad, "_zero_padding", False) else next(params, None)
            yield 0 if param is None else keys[param] + skipped
            skipped = 0


def _slices(tensor: Tensor, pieces: Sequence[PartitionSlice], length: int) -> Sequence[Tensor]:
    """The pieces of a tensor with a number per element of a partition, or one per block."""
    if tensor.numel() == length:
        return tensor.split([piece.length for piece in pieces])
    return tensor.split([-(-piece.length // BLOCK) for piece in pieces])


def wrapped(number: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _elements(piece: PartitionSlice, firsts: Sequence[int], device: torch.device) -> Tensor:
    """Identifiers of a piece's elements, as :meth:`StateFormat.encode` gets them; ``firsts`` are
    those of each gradient's first."""
    begins = [firsts[part.gradient] + part.start for part in piece.parts]
    if piece.whole:
        return torch.full((), wrapped(begins[0]), dtype=torch.int32, device=device)
    numbers = torch.zeros(piece.length, dtype=torch.int32, device=device)
    place = 0
    for part, begin in zip(piece.parts, begins, strict=True):
        # Counted in 64 bits; the lower half is used.
        counted = torch.arange(begin, begin + part.length, device=device)
        numbers[place : place + part.length] = counted.to(torch.int32)
        place += part.length
    return numbers


def _collect(piece: PartitionSlice, grads: Sequence[Tensor], buffer: Tensor) -> Tensor:
    """A piece's gradients in the buffer's dtype; where they are, if they can be used from there."""
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
