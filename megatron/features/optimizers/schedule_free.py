"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682). Gradients are computed at y, a point
between the iterate z and the average x of its history. Evaluations, checkpoints and exports use x.

The optimizer's weights are y, and x is computed from y and z. A checkpoint has x as the weight, and
y and z as states, so that training resumes at exactly the same y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from megatron.engine.state import TRAINED, has_main_weights, holders, set_trained_weights
from megatron.engine.train_engine import TrainEngine
from megatron.features.optimizers.rules import Group, RuleContext, UpdateRule, rooted
from megatron.parallel.mesh import Mesh

_SUMS = "schedule_free:sums"


class ScheduleFree(UpdateRule):
    """Schedule-free AdamW, which updates each element separately. The updated tensors are y.

    Attributes:
        kept: y of the tensors that currently contain x.
        on_load: function called after states have been loaded.
    """

    states = ("z", "exp_avg_sq")

    def __init__(self, betas: tuple[float, float], eps: float, mesh: Mesh) -> None:
        self.betas, self._eps, self._first = betas, eps, mesh.world.rank == 0
        self._sums: list[Tensor] = []
        self.on_load: Callable[[], None] = lambda: None
        self.kept: dict[Tensor, Tensor] = {}

    @classmethod
    def of(cls, context: RuleContext) -> Self:
        return cls(context.betas, context.eps, context.mesh)

    def create(self, tensor: Tensor) -> Group:
        """Return the initial states. z equals the tensor. ``sums``, which weight z in the average,
        are the sum over steps of the squared largest learning rate so far, and that rate. The rate
        is that of ``--lr`` for all tensors, so that their sums are equal: a checkpoint has one."""
        self._sums.append(sums := torch.zeros(2, dtype=torch.float64))
        return {"z": tensor.detach().clone(), "exp_avg_sq": torch.zeros_like(tensor), "sums": sums}

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        (beta1, beta2), rate, decay = self.betas, group["lr"], group["weight_decay"]
        for y, state in zip(tensors, states, strict=True):
            grad, z, sums = y.grad, state["z"], state["sums"]
            assert grad is not None
            highest = max(float(sums[1]), group["common_lr"])
            sums[0] += highest**2
            sums[1] = highest
            share = highest**2 / float(sums[0]) if highest else 0.0
            squares = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            update = grad / rooted(squares, beta2, float(state["step"]), self._eps)
            if decay:
                shrinks = update * y >= 0 if group.get("cautious") else None
                update.add_(y if shrinks is None else torch.where(shrinks, y, 0), alpha=decay)
            y.lerp_(z, share).add_(update, alpha=rate * (beta1 * (1 - share) - 1))
            z.sub_(update, alpha=rate)

    def mean(self, y: Tensor, z: Tensor) -> Tensor:
        """Return x, given that y = beta1 x + (1 - beta1) z."""
        return torch.lerp(y, z, 1 - 1 / self.betas[0])

    def more_states(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        return {_SUMS: self._sums[-1].view(torch.uint8)} if self._sums and self._first else {}

    def load_more(self, read: Callable[[str], Tensor], groups: Sequence[Group]) -> None:
        for sums in self._sums:
            sums.copy_(read(_SUMS).view(torch.float64))
        self.on_load()


class MeanPartition:
    """View of a tensor y in its checkpoint form, in which the state ``weight`` is x."""

    def __init__(self, rule: ScheduleFree, main: Tensor, state: Mapping[str, Tensor]) -> None:
        self._rule, self._main, self._state = rule, main, state

    def has(self, kind: str) -> bool:
        """Return whether this state exists. Only the weight exists before the first update."""
        return kind == "weight" or bool(self._state)

    def get(self, kind: str, start: int, count: int) -> Tensor:
        """Return elements of a state. The elements of x are a new tensor, not a view."""
        y = self._rule.kept.get(self._main, self._main.data).view(-1).narrow(0, start, count)
        if kind == TRAINED or not self._state:
            return y
        if kind == "weight":
            return self._rule.mean(y, self._state["z"].view(-1).narrow(0, start, count))
        return self._state[kind].view(-1).narrow(0, start, count)

    def set(self, kind: str, start: int, values: Tensor) -> None:
        """Set elements of a state. ``weight`` and y share a tensor, so the last one set remains."""
        self._rule.kept.pop(self._main, None)
        target = self._main.data if kind in ("weight", TRAINED) else self._state[kind]
        target.view(-1).narrow(0, start, values.numel()).copy_(values)


class Switch:
    """Switch between the weights y, with which an engine trains, and x, with which it evaluates."""

    def __init__(self, engine: TrainEngine, rule: ScheduleFree) -> None:
        self._engine, self._rule, self._training = engine, rule, True
        self._separate = has_main_weights(engine)

    @torch.no_grad()
    def __call__(self, training: bool) -> None:
        if training == self._training or self._without_states():
            return
        self._training = training
        self.refresh()

    def loaded(self) -> None:
        """Switch to y after a checkpoint has been loaded."""
        self._training = True
        self.refresh()

    def refresh(self) -> None:
        """Copy y (in training) or x into the weights with which the model computes."""
        engine, rule = self._engine, self._rule
        if self._separate:
            # The optimizer states contain x as the weight and y as the trained weight.
            set_trained_weights(engine, lambda o: o.get(o.trained if self._training else "weight"))
        else:
            for holder in holders(engine):
                z = self._z(holder)
                if self._training and holder in rule.kept:
                    holder.data.copy_(rule.kept.pop(holder))
                elif not self._training and z is not None and holder not in rule.kept:
                    rule.kept[holder] = holder.detach().clone()
                    holder.data.copy_(rule.mean(holder.data, z))
            engine.kernels.invalidate()

    def _without_states(self) -> bool:
        return all(self._z(holder) is None for holder in holders(self._engine))

    def _z(self, holder: Tensor) -> Tensor | None:
        return self._engine.optimizer.state.get(holder, {}).get("z")
