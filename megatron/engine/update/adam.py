"""AdamW on slices of flat tensors. An update reads the gradients, and reads and writes the
optimizer states and the model's weights, without temporary tensors as large as a slice.

:class:`ElementwiseAdam` is one elementwise function, which torch compiles to one kernel, for states
in any :class:`StateFormat`. :class:`FusedAdam` is torch's own kernel, for float32 states only; it
needs a float32 copy of a slice's gradients. Neither changes anything if ``held`` is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

BLOCK = 256
"""Alignment of slices in elements: slices start at multiples of this number, and all slices of a
partition but the last have a multiple as their length."""

FIRST = 2**20
"""Number of elements in the first, compiled call: enough for many per thread of a GPU."""

SliceUpdate = Callable[[Tensor, Tensor, tuple[Tensor, ...]], None]
"""Function that updates a slice in place, given its gradients (n,), the identifiers of its elements
(see :meth:`StateFormat.encode`), and the slices of :meth:`StateFormat.tensors`."""


class Decoded(NamedTuple):
    """Weights and moments of n elements in float32."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


Arranged = tuple[Tensor, Tensor, tuple[Tensor, ...]]


class StateFormat(Protocol):
    """Storage format of main weights and moments. torch's compiler traces the methods on slices for
    any number of elements n, so they must not read a number from a tensor.

    Attributes:
        keys: identifier (int32) of the first element of a rank's shard of each parameter, which
            seeds random bits; None if the format needs none.
    """

    keys: Mapping[nn.Parameter, int] | None

    def create(self, main: Tensor) -> dict[str, Tensor]:
        """Return a partition's initial moments, the entries for ``optimizer.state[main]``."""

    def tensors(
        self, model: Tensor, main: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Return all tensors that an update writes: flat, with one value per element of the
        partition or per :data:`BLOCK` elements. ``model`` has the model's own weights."""

    def arrange(self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> Arranged:
        """Return a slice, its gradients and elements as views, shaped for :meth:`decode`."""

    def decode(self, stored: tuple[Tensor, ...]) -> Decoded:
        """Return the weights and moments of a slice, all of the same shape."""

    def encode(
        self, stored: tuple[Tensor, ...], new: Decoded, held: Tensor, elements: Tensor, step: Tensor
    ) -> None:
        """Write ``new`` to a slice. If ``held`` (a bool scalar), ``new`` is the result of
        :meth:`decode`, and every stored bit must stay the same. ``elements`` and ``step`` seed
        random bits: ``elements`` identifies each element (int32; a scalar identifies the first of
        consecutive elements), and ``step`` is the number of updates, including this one."""


class Partition(Protocol):
    """Main weights that the optimizer updates and their moments, accessed as float32."""

    def has(self, kind: str) -> bool:
        """Return whether this state exists. Moments do not exist before the first update."""
        ...

    def get(self, kind: str, start: int, count: int) -> Tensor:
        """Return the elements [start, start + count) of a state as a flat tensor."""
        ...

    def set(self, kind: str, start: int, values: Tensor) -> None:
        """Write elements of a state, beginning at ``start``."""
        ...


class StateStore(StateFormat, Protocol):
    """Storage format other than float32 for main weights and moments, at ZeRO 1 and 2."""

    def take_main_weights(self, wrapper: Any, optimizer: torch.optim.Optimizer) -> None:
        """Make DeepSpeed's ``wrapper`` around ``optimizer`` update the model's weights instead of a
        float32 copy."""

    def model_weights(self, values: Tensor) -> Tensor:
        """Return float32 weights in the form in which the model stores them."""
        ...

    def partition(self, main: Tensor, state: Mapping[str, Tensor]) -> Partition:
        """Return the partition with the main weights ``main`` and their states ``state``."""
        ...


@dataclass
class KeptState:
    """State that a feature keeps besides the optimizer's: one number per trained weight. Neither
    the model nor the update reads it, but checkpoints contain it.

    Attributes:
        tensors: float32 tensors, by the updated tensor whose shape they have; empty at first.
        count: number of updates; a scalar on the device, or a number.
    """

    tensors: dict[Tensor, Tensor] = field(default_factory=dict)
    count: Tensor | int = 0

    def restart(self, holders: Iterable[Tensor], count: int) -> None:
        """Create states of zeros for these updated tensors, or none if ``count`` is 0."""
        self.count = count
        self.tensors = {
            holder: torch.zeros_like(holder, dtype=torch.promote_types(holder.dtype, torch.float32))
            for holder in (holders if count else ())
        }


class Float32States:
    """Float32 main weights and moments. The model's weights are a rounded copy."""

    keys: Mapping[nn.Parameter, int] | None = None

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
    """Scalars for one update, in float32 on the device.

    Attributes:
        factor: factor by which gradients are multiplied.
        held: 1 to change nothing, else 0.
        step: number of updates, including this one.
        keep: factor of the weights for weight decay, 1 - lr * decay.
        step_size: learning rate, corrected for the bias of the first moment.
        root: square root of the bias correction of the second moment."""

    factor: Tensor
    held: Tensor
    step: Tensor
    keep: Tensor
    step_size: Tensor
    root: Tensor
    eps: Tensor


class ElementwiseAdam:
    """Updates slices in any format. With ``compiled``, torch generates one kernel, the same for
    slices of all sizes; otherwise many operations run."""

    def __init__(
        self, form: StateFormat, betas: tuple[float, float], eps: float, compiled: bool
    ) -> None:
        self._form, self._betas, self._eps = form, betas, eps
        self._compiled = compiled
        self._update: Callable[..., None] = self.update

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to which gradients with this dtype must be converted."""
        return dtype

    def of_group(
        self, group: Mapping[str, Any], step: Tensor, factor: Tensor | None, held: Tensor
    ) -> SliceUpdate:
        """Return the update function for a parameter group. ``step`` already counts this update."""
        rates = self._rates(group, step, factor, held)

        def update(grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> None:
            if self._compiled:
                self._compile(grad, elements, stored, rates)
            self._update(*self._arranged(grad, elements, stored), *rates)

        return update

    def _arranged(self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...]) -> Arranged:
        grad, elements, stored = self._form.arrange(grad, elements, stored)
        # Detached, since torch recompiles for a view whenever the shape of its base tensor differs.
        return grad.detach(), elements.detach(), tuple(tensor.detach() for tensor in stored)

    def _compile(
        self, grad: Tensor, elements: Tensor, stored: tuple[Tensor, ...], rates: Rates
    ) -> None:
        """Compile with newly allocated tensors. If the first slice started within another tensor,
        torch would recompile for one that does not."""

        def own(like: Tensor) -> Tensor:
            if not like.dim():
                return like
            return like.new_zeros(FIRST if len(like) == len(grad) else FIRST // BLOCK)

        self._compiled = False
        # imports the compiler
        self._update = torch.compile(self.update, dynamic=True, fullgraph=True)
        first = self._arranged(own(grad), own(elements), tuple(map(own, stored)))
        # The betas and a format's numbers become constants. As inputs, torch 2.11 would compile
        # once more, and a sum of int32 with such a number would be int64 on a GPU.
        with torch._dynamo.config.patch(specialize_float=True, specialize_int=True):
            self._update(*first, *rates)

    def _rates(
        self, group: Mapping[str, Any], step: Tensor, factor: Tensor | None, held: Tensor
    ) -> Rates:
        lr, decay = group["lr"], group["weight_decay"]
        # In float32 a power of 0.999 would keep only four digits after the subtraction.
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
        """Apply an AdamW update with ``grad`` (n,) in float32. ``numbers`` are :class:`Rates`."""
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
    """Updates :class:`Float32States` with torch's fused AdamW, on CPUs or without a compiler."""

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
