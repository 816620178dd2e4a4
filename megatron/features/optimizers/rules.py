"""An optimizer of groups that are updated by different rules, and rules for single elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

Group = dict[str, Any]


class UpdateRule(ABC):
    """Update of the tensors of a group, whose learning rate and decay are in the group.

    Attributes:
        states: names of the states of a tensor, each of its shape and dtype.
    """

    states: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        """Update tensors by their gradients; ``step`` of each state has counted this update."""


class Adam(UpdateRule):
    """AdamW, by torch's kernel."""

    states = ("exp_avg", "exp_avg_sq")

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self._betas, self._eps = betas, eps

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        counted = [state["step"] - 1 for state in states]  # the kernel counts, too
        adamw(
            list(tensors),
            [tensor.grad for tensor in tensors],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            counted,
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._eps,
            maximize=False,
        )


class Lion(UpdateRule):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of a mean of gradient and
    momentum, with decoupled decay."""

    states = ("exp_avg",)

    def __init__(self, betas: tuple[float, float]) -> None:
        self._betas = betas

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], self._betas
        for tensor, state in zip(tensors, states, strict=True):
            grad, mean = tensor.grad, state["exp_avg"]
            assert grad is not None
            direction = torch.lerp(grad, mean, beta1).sign_()
            mean.lerp_(grad, 1 - beta2)
            tensor.mul_(1 - rate * decay).sub_(direction, alpha=rate)


class RuledOptimizer(torch.optim.Optimizer):
    """Groups of tensors, each updated by the rule that ``rule`` of the group names.

    Args:
        groups: of ``torch.optim``, with ``rule``.
        rules: by name.

    Attributes:
        states_of: names of the states of each parameter.
    """

    def __init__(
        self, groups: list[Group], rules: Mapping[str, UpdateRule], defaults: dict[str, Any]
    ) -> None:
        self.rules = rules
        self.states_of = {
            param: rules[group["rule"]].states for group in groups for param in group["params"]
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the tensors that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            states = [self.state[tensor] for tensor in tensors]
            for tensor, state in zip(tensors, states, strict=True):
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                    names = self.rules[group["rule"]].states
                    state.update({name: torch.zeros_like(tensor) for name in names})
                state["step"] += 1
            if tensors:
                self.rules[group["rule"]].update(tensors, states, group)
