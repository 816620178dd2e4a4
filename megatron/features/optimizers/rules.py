"""An optimizer of groups that are updated by different rules, and rules for single elements."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from megatron.parallel.mesh import AXES, Mesh
from megatron.parallel.shard import shard_of

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.features.optimizers.flags import OptimizersConfig

Group = dict[str, Any]

Place = tuple[int, Tensor, int, int]
"""Start of a rank's part in its share of a parameter, the tensor that the optimizer updates, the
part's start in that, and its length (nothing below 1)."""

PlaceOf = Callable[[nn.Parameter], Place]


class RuleContext(NamedTuple):
    """The run that a rule is made for.

    Attributes:
        flags: of the feature.
        names: canonical name of each parameter that the rule updates.
    """

    config: RunConfig
    flags: OptimizersConfig
    names: Mapping[nn.Parameter, str]
    mesh: Mesh

    @property
    def betas(self) -> tuple[float, float]:
        """``--adam-beta1`` and ``--adam-beta2``."""
        return self.config.optimizer.adam_beta1, self.config.optimizer.adam_beta2

    @property
    def eps(self) -> float:
        """``--adam-eps``."""
        return self.config.optimizer.adam_eps


class UpdateRule(ABC):
    """Update of the tensors of a group, whose learning rate and decay are in the group.

    Attributes:
        states: names of the states of a tensor, each of its shape and dtype.
        place_of: finds this rank's part of a parameter, once the engine exists.
        divided: whether processes have parts of the tensors (ZeRO 1 to 3), then.
    """

    states: ClassVar[tuple[str, ...]] = ()
    place_of: PlaceOf
    divided: bool = False

    @classmethod
    @abstractmethod
    def of(cls, context: RuleContext) -> Self:
        """The rule of a run."""

    @abstractmethod
    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        """Update tensors by their gradients; ``step`` of each state has counted this update."""

    def create(self, tensor: Tensor) -> Group:
        """The states of a tensor before its first update."""
        return {name: torch.zeros_like(tensor) for name in self.states}

    def more_states(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        """States of this rank that have other shapes than tensors, by a name that does not depend
        on the layout; every rank must call it. ``groups`` are this rule's."""
        return {}

    def load_more(  # noqa: B027
        self, read: Callable[[str], Tensor], groups: Sequence[Group]
    ) -> None:
        """Load them; ``read`` raises KeyError for what a checkpoint lacks."""


def descend(tensor: Tensor, update: Tensor, group: Group) -> None:
    """Subtract an update times the learning rate, and decay the weights: with
    ``--cautious-weight-decay`` only weights that the update shrinks."""
    rate, decay = group["lr"], group["weight_decay"]
    if decay and group.get("cautious"):
        shrinks = update * tensor >= 0
        tensor.sub_(torch.where(shrinks, tensor, 0), alpha=rate * decay)
    else:
        tensor.mul_(1 - rate * decay)
    tensor.sub_(update, alpha=rate)


def rooted(mean_of_squares: Tensor, beta: float, step: float, eps: float) -> Tensor:
    """The root of a second moment, corrected for the zeros that it started from, plus epsilon."""
    return mean_of_squares.sqrt().div_((1 - beta**step) ** 0.5).add_(eps)


class Adam(UpdateRule):
    """AdamW, by torch's kernel; with ``among``, the names of parameters and the ranks that have
    parts of them, updates are cautious."""

    states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        betas: tuple[float, float],
        eps: float,
        among: tuple[Mapping[nn.Parameter, str], Mesh] | None = None,
    ) -> None:
        self._betas, self._eps, self._among = betas, eps, among

    @classmethod
    def of(cls, context: RuleContext) -> Self:
        cautious = context.flags.cautious_update
        among = (context.names, context.mesh) if cautious else None
        return cls(context.betas, context.eps, among)

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        if self._among is not None or (group.get("cautious") and group["weight_decay"]):
            directions = list(map(self._direction, tensors, states))
            if self._among is not None:
                self._drop_opposed(tensors, directions, *self._among)
            for tensor, direction in zip(tensors, directions, strict=True):
                descend(tensor, direction, group)
            return
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
            eps=group.get("eps", self._eps),
            maximize=False,
        )

    def _direction(self, tensor: Tensor, state: Group) -> Tensor:
        (beta1, beta2), step, grad = self._betas, float(state["step"]), tensor.grad
        assert grad is not None
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        squares = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return (mean / (1 - beta1**step)).div_(rooted(squares, beta2, step, self._eps))

    def _drop_opposed(
        self,
        tensors: Sequence[Tensor],
        directions: Sequence[Tensor],
        names: Mapping[nn.Parameter, str],
        mesh: Mesh,
    ) -> None:
        """Set elements of updates that the gradient opposes to 0, and divide the others of each
        whole parameter by their share (Liang et al. 2024, arXiv:2411.16085, algorithm 2), in
        place."""
        flat = dict(zip(tensors, directions, strict=True))
        among = ("tensor",) if self.divided else AXES
        kept: dict[str, Tensor] = {}
        pieces: list[tuple[Tensor, str, int]] = []
        for param, name in names.items():
            _, holder, offset, length = self.place_of(param)
            if holder not in flat:
                continue
            assert holder.grad is not None
            first, count = (offset, length) if length > 0 else (0, 0)
            update = flat[holder].view(-1).narrow(0, first, count)
            update.mul_(update * holder.grad.view(-1).narrow(0, first, count) > 0)
            shard = shard_of(param)
            counted = shard.counted(mesh.coordinates, among)
            kept[name] = kept.get(name, 0) + update.count_nonzero() * counted
            pieces.append((update, name, math.prod(shard.canonical_shape)))
        counts = torch.stack([*kept.values()]).double()
        for ranks in (mesh.dense, mesh.tensor):
            if ranks.size > 1:
                dist.all_reduce(counts, group=ranks.handle)
        shares = dict(zip(kept, counts, strict=True))
        for update, name, elements in pieces:
            update.div_((shares[name] / elements).clamp(min=1e-3).to(update.dtype))


class Lion(UpdateRule):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of a mean of gradient and
    momentum, with decoupled decay."""

    states = ("exp_avg",)

    def __init__(self, betas: tuple[float, float]) -> None:
        self._betas = betas

    @classmethod
    def of(cls, context: RuleContext) -> Self:
        return cls((context.flags.lion_beta1, context.flags.lion_beta2))

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        beta1, beta2 = self._betas
        for tensor, state in zip(tensors, states, strict=True):
            grad, mean = tensor.grad, state["exp_avg"]
            assert grad is not None
            direction = torch.lerp(grad, mean, beta1).sign_()
            mean.lerp_(grad, 1 - beta2)
            descend(tensor, direction, group)


class RuledOptimizer(torch.optim.Optimizer):
    """Groups of tensors, each updated by the rule named in its ``rule``.

    Args:
        groups: of ``torch.optim``, with ``rule``.
        rules: by name.
        defaults: of groups; ``peak_lr``, where it is not None, is the learning rate relative to
            which a step's rate multiplies the decay.

    Attributes:
        creators: functions that make the states of each parameter's tensor.
    """

    def __init__(
        self, groups: list[Group], rules: Mapping[str, UpdateRule], defaults: dict[str, Any]
    ) -> None:
        self.rules = rules
        self.creators = {
            param: rules[group["rule"]].create for group in groups for param in group["params"]
        }
        super().__init__(groups, defaults)

    def more_states(self) -> dict[str, Tensor]:
        """States of this rank that have other shapes than the tensors; every rank calls it."""
        return {
            key: values
            for name, rule in self.rules.items()
            for key, values in rule.more_states(self._groups_of(name)).items()
        }

    def load_more(self, read: Callable[[str], Tensor]) -> None:
        """Load them; ``read`` raises KeyError for what a checkpoint lacks."""
        for name, rule in self.rules.items():
            rule.load_more(read, self._groups_of(name))

    def _groups_of(self, rule: str) -> list[Group]:
        return [group for group in self.param_groups if group["rule"] == rule]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the tensors that have a gradient."""
        assert closure is None
        for group, params in joined(self.param_groups):
            rule = self.rules[group["rule"]]
            tensors = [tensor for tensor in params if tensor.grad is not None]
            states = [self.state[tensor] for tensor in tensors]
            for tensor, state in zip(tensors, states, strict=True):
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                    state.update(rule.create(tensor))
                state["step"] += 1
            if tensors:
                rule.update(tensors, states, _with_decay_of_rate(group))


def joined(groups: Sequence[Group]) -> list[tuple[Group, list[Tensor]]]:
    """Return groups with the tensors of all that are updated together with them."""
    params: dict[Any, tuple[Group, list[Tensor]]] = {}
    for number, group in enumerate(groups):
        key = group.get("together"), None if "together" in group else number
        params.setdefault(key, (group, []))[1].extend(group["params"])
    return list(params.values())


def _with_decay_of_rate(group: Group) -> Group:
    """AdamC (Defazio 2025, arXiv:2506.02285): decay times the learning rate over its peak."""
    if group.get("peak_lr") is None:
        return group
    share = group["lr"] / (group["peak_lr"] * group.get("lr_factor", 1.0) or 1.0)
    return {**group, "weight_decay": group["weight_decay"] * share}
