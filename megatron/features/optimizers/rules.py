"""Optimizer that updates groups by different rules, and rules that update elements separately."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim.adamw import adamw

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.manifest import MORE_STATES
from megatron.parallel.mesh import AXES, Mesh
from megatron.parallel.shard import shard_of

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.features.optimizers.flags import OptimizersConfig

Group = dict[str, Any]

Place = tuple[int, Tensor, int, int]
"""Location of this rank's partition of a parameter: its start in the rank's shard of the parameter,
the tensor that the optimizer updates, its start in that tensor, and its length. A length below 1
means that the rank has no partition."""

PlaceOf = Callable[[nn.Parameter], Place]


class RuleContext(NamedTuple):
    """Run and parameters for which a rule is built.

    Attributes:
        flags: flags of this feature.
        names: canonical name of each parameter that the rule updates.
    """

    config: RunConfig
    flags: OptimizersConfig
    names: Mapping[nn.Parameter, str]
    mesh: Mesh

    @property
    def betas(self) -> tuple[float, float]:
        """Values of ``--adam-beta1`` and ``--adam-beta2``."""
        return self.config.optimizer.adam_beta1, self.config.optimizer.adam_beta2

    @property
    def eps(self) -> float:
        """Value of ``--adam-eps``."""
        return self.config.optimizer.adam_eps


class UpdateRule(ABC):
    """Rule that updates the tensors of a group, which has the learning rate and weight decay.

    Attributes:
        states: names of the states that have the shape and dtype of their tensor.
        place_of: function that locates this rank's partition of a parameter; set with the engine.
        divided: True if the tensors are partitioned across ranks (ZeRO 1 to 3); set with the
            engine.
    """

    states: ClassVar[tuple[str, ...]] = ()
    place_of: PlaceOf
    divided: bool = False

    @classmethod
    @abstractmethod
    def of(cls, context: RuleContext) -> Self:
        """Build the rule of a run."""

    @abstractmethod
    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        """Update tensors in place by their gradients. ``step`` in each state counts this update."""

    def create(self, tensor: Tensor) -> Group:
        """Return the initial states of a tensor."""
        return {name: torch.zeros_like(tensor) for name in self.states}

    def more_states(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        """Return this rank's optimizer states whose shapes differ from their parameters'. Names do
        not depend on the layout. ``groups`` are those of this rule. Every rank must call this."""
        return {}

    def load_more(  # noqa: B027
        self, read: Callable[[str], Tensor], groups: Sequence[Group]
    ) -> None:
        """Load the states of :meth:`more_states`. ``read`` raises CheckpointError for a missing
        name."""


def descend(tensor: Tensor, update: Tensor, group: Group) -> None:
    """Subtract an update times the learning rate from ``tensor``, and apply weight decay, in place.
    With ``--cautious-weight-decay`` only weights that the update shrinks are decayed."""
    rate, decay = group["lr"], group["weight_decay"]
    if decay and group.get("cautious"):
        shrinks = update * tensor >= 0
        tensor.sub_(torch.where(shrinks, tensor, 0), alpha=rate * decay)
    else:
        tensor.mul_(1 - rate * decay)
    tensor.sub_(update, alpha=rate)


def rooted(mean_of_squares: Tensor, beta: float, step: float, eps: float) -> Tensor:
    """Return the square root of a second moment after bias correction, plus epsilon."""
    return mean_of_squares.sqrt().div_((1 - beta**step) ** 0.5).add_(eps)


class Adam(UpdateRule):
    """AdamW with torch's kernel. If ``among`` is given, updates are cautious. It contains the names
    of the parameters, and the mesh whose ranks have shards or partitions of them."""

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
        counted = [state["step"] - 1 for state in states]  # The kernel increments the step, too.
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
        """Zero elements of updates in place if their sign differs from the gradient's, and divide
        the others by the fraction of the whole parameter's elements that remains (Liang et al.
        2024, arXiv:2411.16085, algorithm 2)."""
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
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of an average of gradient
    and momentum, with decoupled weight decay."""

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
    """Optimizer that updates each group of tensors by the rule that the group's ``rule`` names.

    Args:
        groups: groups of ``torch.optim`` with the additional key ``rule``.
        rules: rules by name.
        defaults: default values of groups. If ``peak_lr`` is not None, the weight decay is
            multiplied by the groups' ``common_lr`` divided by ``peak_lr``.

    Attributes:
        creators: function that creates the states of a tensor, by parameter.
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
        """Return this rank's optimizer states whose shapes differ from their parameters'.
        Collective: every rank must call this."""
        return {
            key: values
            for name, rule in self.rules.items()
            for key, values in rule.more_states(self._groups_of(name)).items()
        }

    def load_more(self, folder: Path, optimizer: str) -> None:
        """Load the states of :meth:`more_states` from a checkpoint. If ranks saved contributions to
        a state, they are summed. Raises CheckpointError with the value of ``--optimizer`` if a
        state is missing."""
        with ExitStack() as files:
            opened = [
                files.enter_context(safe_open(path, "pt"))  # type: ignore[no-untyped-call]
                for path in sorted(folder.glob(f"{MORE_STATES}-*.safetensors"))
            ]
            places = {key: file for file in opened for key in file.keys()}  # noqa: SIM118

            def read(name: str) -> Tensor:
                keys = [key for key in places if key.partition("/")[0] == name]
                if not keys:
                    raise CheckpointError(
                        f"{folder} has no {name} of --optimizer {optimizer}: --no-load-optim "
                        "starts with a new state"
                    )
                first, *others = (places[key].get_tensor(key) for key in keys)
                return sum(others, start=first)

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
    """Merge groups with the same ``together`` value, and return each with all of its tensors."""
    params: dict[Any, tuple[Group, list[Tensor]]] = {}
    for number, group in enumerate(groups):
        key = group.get("together"), None if "together" in group else number
        params.setdefault(key, (group, []))[1].extend(group["params"])
    return list(params.values())


def _with_decay_of_rate(group: Group) -> Group:
    """Return the group with its weight decay multiplied by the run's learning rate divided by its
    peak, as in AdamC (Defazio 2025, arXiv:2506.02285), whatever the group's own rate is."""
    if group.get("peak_lr") is None:
        return group
    share = group["common_lr"] / group["peak_lr"]
    return {**group, "weight_decay": group["weight_decay"] * share}
