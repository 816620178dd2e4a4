"""AdamW on a slice of flat tensors: gradients are read, the optimizer's numbers and the weights of
the model are read and written, and nothing of a slice's size is made in between.

:class:`ElementwiseAdam` is one function of the elements, which torch compiles to one kernel, for
numbers in any :class:`StateFormat`. :class:`FusedAdam` is torch's own kernel, for float32 only; it
needs a float32 copy of a slice's gradients. Both change nothing where ``held`` is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron.parallel.mesh import Coordinates

BLOCK = 256
"""Slices start at multiples of this number of elements, and all but the last of a partition have a
multiple of it."""

FIRST = 2**20
"""Number of elements to compile for: enough that torch gives every thread of a GPU many."""

SliceUpdate = Callable[[Tensor, Tensor, tuple[Tensor, ...]], None]
"""Updates a slice: gets its gradients (n,), its elements as for :meth:`StateFormat.encode`, and the
slices of :meth:`StateFormat.tensors`, which it writes."""


class Decoded(NamedTuple):
    """The optimizer's numbers of n elements in float32."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


Arranged = tuple[Tensor, Tensor, tuple[Tensor, ...]]


class StateFormat(Protocol):
    """Storage of main weights and moments. Its methods on slices are traced by torch's compiler,
    for any n: no number may be read from a tensor."""

    def create(self, main: Tensor) -> dict[str, Tensor]:
        """Moments of a partition before its first update, by their names in
        ``optimizer.state[main]``."""

    def tensors(
        self, model: Tensor, main: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """All that an update writes: flat, each with a number per element of the partition or one
        per :data:`BLOCK` of them. ``model``: the weights that the model computes with."""

    def arrange(self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> Arranged:
        """Views of a slice, its gradients and its elements in the shape of :meth:`decode`."""

    def decode(self, stored: tuple[Tensor, ...]) -> Decoded:
        """The numbers of a slice, all of one shape."""

    def encode(
        self, stored: tuple[Tensor, ...], new: Decoded, held: Tensor, elements: Tensor, step: Tensor
    ) -> None:
        """Writes a slice. ``new`` is what :meth:`decode` gave where ``held`` (bool, no dimensions):
        then every stored bit must stay. For random bits: ``elements`` identifies each (int32, or
        only that of the first, if the others follow), ``step`` is the number of the update."""


class Partition(Protocol):
    """Main weights that the optimizer updates with their moments, read and written in float32."""

    def has(self, kind: str) -> bool:
        """True if there is this state: no moments before the first update."""
        ...

    def get(self, kind: str, start: int, count: int) -> Tensor:
        """Elements [start, start + count) of a state, flat."""
        ...

    def set(self, kind: str, start: int, values: Tensor) -> None:
        """Write elements from ``start`` on."""
        ...


class StateStore(StateFormat, Protocol):
    """A format other than float32 copies of weights and moments, at ZeRO 1 and 2."""

    def take_main_weights(
        self, wrapper: Any, optimizer: torch.optim.Optimizer, ranks: Sequence[int]
    ) -> None:
        """Make DeepSpeed's optimizer ``wrapper`` around ``optimizer`` update the model's weights
        instead of a float32 copy; ``ranks``: this process's place among those that share each group
        of parameters."""

    def keys(
        self, seed: int, names: Mapping[nn.Parameter, str], coordinates: Coordinates
    ) -> Mapping[nn.Parameter, int]:
        """The identifier (int32) of the first element of a rank's share of each parameter."""
        ...

    def model_weights(self, values: Tensor) -> Tensor:
        """Float32 weights as the model has them."""
        ...

    def partition(self, main: Tensor, state: Mapping[str, Tensor]) -> Partition:
        """The partition ``main`` with its part of ``optimizer.state``."""
        ...


@dataclass
class KeptState:
    """A number for each weight that is trained, which a feature keeps next to the optimizer's
    states: neither the model nor the update reads it. Checkpoints have it.

    Attributes:
        tensors: float32, by the tensor that the optimizer updates and of its shape; none before the
            first update.
        count: number of updates; a scalar on the device, or a number.
    """

    tensors: dict[Tensor, Tensor] = field(default_factory=dict)
    count: Tensor | int = 0

    def restart(self, holders: Iterable[Tensor], count: int) -> None:
        """Make tensors of zeros for these of the optimizer, or none where ``count`` is 0."""
        self.count = count
        self.tensors = {
            holder: torch.zeros_like(holder, dtype=torch.promote_types(holder.dtype, torch.float32))
            for holder in (holders if count else ())
        }


class Float32States:
    """Main weights and moments in float32, the model's weights a rounded copy."""

    def create(self, main: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(main.detach()) for name in ("exp_avg", "exp_avg_sq")}

    def tensors(
        self, model: Tensor, main: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        return model, main, state["exp_avg"], state["exp_avg_sq"]

    def arrange(self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> Arranged:
        return grad, elements, stored

    def decode(self, stored: tuple[Tensor, ...]) -> Decoded:
        return Decoded(*stored[1:])

    def encode(
        self, stored: tuple[Tensor, ...], new: Decoded, held: Tensor, elements: Tensor, step: Tensor
    ) -> None:
        for tensor, values in zip(stored, (new.weight, *new), strict=True):
            tensor.copy_(values)


class Rates(NamedTuple):
    """Numbers of one update, float32 without dimensions, on the device: ``factor`` of the
    gradients; ``held``; ``step``, the count of updates with this one; ``keep``, what decay leaves
    of a weight; ``step_size`` and ``root`` (of the second moment), corrected for the zeros that
    moments start from."""

    factor: Tensor
    held: Tensor
    step: Tensor
    keep: Tensor
    step_size: Tensor
    root: Tensor
    eps: Tensor


class ElementwiseAdam:
    """Updates slices in any format; ``compiled``: by one kernel that torch generates, the same for
    slices of all sizes, else by many operations."""

    def __init__(
        self, form: StateFormat, betas: tuple[float, float], eps: float, compiled: bool
    ) -> None:
        self._form, self._betas, self._eps = form, betas, eps
        self._compiled = compiled
        self._update: Callable[..., None] = self.update

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that gradients of this dtype must be given in."""
        return dtype

    def of_group(
        self, group: Mapping[str, Any], step: Tensor, factor: Tensor | None, held: Tensor
    ) -> SliceUpdate:
        """The update of a group's slices; ``step`` counts this update already."""
        rates = self._rates(group, step, factor, held)

        def update(grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> None:
            if self._compiled:
                self._compile(grad, elements, stored, rates)
            self._update(*self._arranged(grad, elements, stored), *rates)

        return update

    def _arranged(self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> Arranged:
        grad, elements, stored = self._form.arrange(grad, elements, stored)
        # torch compiles a view again for every shape of what it is a view of.
        return grad.detach(), elements.detach(), tuple(tensor.detach() for tensor in stored)

    def _compile(
        self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...], rates: Rates
    ) -> None:
        """Compiles with tensors of their own: for a slice that starts within another tensor, torch
        would compile once more when one does not."""

        def own(like: Tensor) -> Tensor:
            if not like.dim():
                return like
            return like.new_zeros(FIRST if len(like) == len(grad) else FIRST // BLOCK)

        self._compiled = False
        self._update = torch.compile(self.update, dynamic=True, fullgraph=True)  # imports it
        first = self._arranged(own(grad), own(elements), tuple(map(own, stored)))
        # The betas and a format's numbers become constants. As inputs, torch 2.11 would
        # begin once more, and a sum of int32 with such a number would be int64 on a GPU.
        with torch._dynamo.config.patch(specialize_float=True, specialize_int=True):
            self._update(*first, *rates)

    def _rates(
        self, group: Mapping[str, Any], step: Tensor, factor: Tensor | None, held: Tensor
    ) -> Rates:
        lr, decay = group["lr"], group["weight_decay"]
        # Of float32 powers of 0.999 only four digits would remain after the subtraction.
        first, second = (1 - torch.pow(beta, step.double()) for beta in self._betas)
        return Rates(
            factor=torch.ones_like(held) if factor is None else factor.float(),
            held=held,
            step=step,
            keep=torch.full_like(held, 1 - lr * decay),
            step_size=(lr / first).float(),
            root=second.sqrt().float(),
            eps=torch.full_like(held, group.get("eps", self._eps)),
        )

    def update(
        self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...], *numbers: Tensor
    ) -> None:
        """The definition: AdamW of ``grad`` (n,) in float32, ``numbers`` as in :class:`Rates`."""
        rates, (beta1, beta2) = Rates(*numbers), self._betas
        old = self._form.decode(stored)
        grad = grad.float() * rates.factor
        exp_avg = old.exp_avg + (grad - old.exp_avg) * (1 - beta1)
        exp_avg_sq = old.exp_avg_sq * beta2 + grad * grad * (1 - beta2)
        change = rates.step_size * exp_avg / (exp_avg_sq.sqrt() / rates.root + rates.eps)
        new = Decoded(old.weight * rates.keep - change, exp_avg, exp_avg_sq)
        held = rates.held > 0
        new = Decoded(*(torch.where(held, a, b) for a, b in zip(old, new, strict=True)))
        self._form.encode(stored, new, held, elements, rates.step)


class FusedAdam:
    """Updates slices in :class:`Float32States` by torch's fused AdamW, for CPUs, and where there is
    no compiler."""

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self._betas, self._eps = betas, eps

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def of_group(
        self, group: Mapping[str, Any], step: Tensor, factor: Tensor | None, held: Tensor
    ) -> SliceUpdate:
        beta1, beta2 = self._betas

        def update(grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> None:
            model, main, exp_avg, exp_avg_sq = stored
            if factor is not None:
                grad.mul_(factor)
            torch._fused_adamw_(
                [main],
                [grad],
                [exp_avg],
                [exp_avg_sq],
                [],
                [step],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group.get("eps", self._eps),
                amsgrad=False,
                maximize=False,
                found_inf=held,
            )
            model.copy_(main)

        return update
