"""The optimizer that DeepSpeed's engine wraps. torch's optimizers import its compiler
(torch._dynamo, torch._inductor) to keep it from tracing them, which takes as much CPU time as
importing torch. If a later torch does this in another way, starts only become slower. ZeRO 3
imports the compiler nevertheless."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.config import ConfigError, OptimizerConfig, RunConfig
from megatron.config.features import taking_part
from megatron.parallel.mesh import SHARDED, Group, Mesh
from megatron.parallel.shard import shard_of

EXPERTS = "experts"
"""DeepSpeed's name for the parameters that have fewer replicas than dense layers."""

# Attribute with a method's version that torch's compiler does not trace (torch._compile).
_UNTRACED = "__dynamo_disable"


Names = Mapping[nn.Parameter, str]
"""Canonical name of each parameter that is trained."""


class Factors(NamedTuple):
    """Numbers by which what all parameters share is multiplied for one of them.

    Attributes:
        rate: of the learning rate, its minimum included.
        decay: of the weight decay of a parameter that decays.
        epsilon: of ``--adam-eps``.
        decoupled: whether the learning rate is ``--decoupled-lr``.
        decays: whether the parameter decays; by default matrices do.
    """

    rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0
    decoupled: bool = False
    decays: bool | None = None

    def times(self, other: Factors) -> Factors:
        """Return the products with other factors."""
        return self._replace(
            rate=self.rate * other.rate,
            decay=self.decay * other.decay,
            epsilon=self.epsilon * other.epsilon,
        )


class OptimizerPlan(NamedTuple):
    """An optimizer of a feature.

    Attributes:
        rules: name of the rule that updates each parameter; groups have it as ``rule``.
        factors: of the learning rate of a rule's parameters, where it is not 1.
        make: makes the optimizer of groups and of default values.
    """

    rules: Mapping[nn.Parameter, str]
    factors: Mapping[str, float]
    make: Callable[[list[dict[str, Any]], dict[str, Any]], Optimizer]


def factors_of(
    names: Names, config: RunConfig, rules: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> dict[nn.Parameter, Factors]:
    """Return the factors of parameters, those of all features; empty, on every rank, where none has
    any. ``rules``: as of an
    :class:`~megatron.engine.update.optimizer.OptimizerPlan`."""
    factors: dict[nn.Parameter, Factors] = {}
    for feature in taking_part():
        for param, of_feature in feature.update_factors(config, names, rules).items():
            factors[param] = factors.get(param, Factors()).times(of_feature)
    for feature in taking_part():
        factors = dict(feature.group_factors(config, names, factors))
    return factors


def build_optimizer(
    params: Iterable[nn.Parameter],
    config: OptimizerConfig,
    factors: Mapping[nn.Parameter, Factors] = MappingProxyType({}),
    apart: Collection[nn.Parameter] = (),
    plan: OptimizerPlan | None = None,
    cut: Callable[[list[nn.Parameter]], list[list[nn.Parameter]]] = lambda params: [params],
) -> Optimizer:
    """AdamW, SGD or that of a plan over two groups: matrices, which decay, and vectors, which do
    not; two for each of the ``factors``, by default 1, and of the plan's rules, and as many of the
    parameters ``apart``, see :func:`fewer_replicas`. ``cut`` makes several of a group; those of a
    plan have the same number as ``together``: one call updates them, so that a rule can divide
    its work over ranks. The schedule sets learning rate and decay before every step."""
    _keep_compiler_out()
    rules = {} if plan is None else plan.rules
    names = sorted({*rules.values()}) or [""]
    values = sorted({_plain(Factors()), *map(_plain, factors.values())})
    sorted_params: dict[tuple[bool, str, Factors, bool], list[nn.Parameter]] = {
        key: [] for key in product((False, True), names, values, (True, False))
    }
    separate = set(apart)
    for param in params:
        rule, factor = rules.get(param, ""), factors.get(param, Factors())
        decays = shard_of(param).decays if factor.decays is None else factor.decays
        sorted_params[param in separate, rule, _plain(factor), decays].append(param)
    groups = [
        {
            "params": part,
            "weight_decay": config.weight_decay * factor.decay if decays else 0.0,
            "decays": decays,
            "wd_factor": factor.decay,
            "lr_factor": factor.rate * (1.0 if plan is None else plan.factors.get(rule, 1.0)),
            "decoupled": factor.decoupled,
            **({"rule": rule} if rule else {}),
            **({"eps": config.adam_eps * factor.epsilon} if factor.epsilon != 1.0 else {}),
            # DeepSpeed's words for groups that it partitions among other ranks.
            **({"moe": True, "name": EXPERTS} if others else {}),
            **({"together": number} if rule else {}),
        }
        for number, ((others, rule, factor, decays), params) in enumerate(sorted_params.items())
        if params
        for part in cut(params)
    ]
    optimizer: Optimizer
    if plan is not None:
        defaults = {"lr": config.lr, "weight_decay": config.weight_decay}
        optimizer = plan.make(groups, defaults)
    elif config.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    else:
        optimizer = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,  # torch's own kernel, for CPUs too; nothing is compiled
        )
    _keep_compiler_from_steps(optimizer)
    return optimizer


def _plain(factors: Factors) -> Factors:
    return factors._replace(decays=None)


def check_groups(optimizer: Optimizer, mesh: Mesh) -> None:
    """Raises ConfigError where pipeline stages have different numbers of groups: DeepSpeed's own
    step exchanges a number for each."""
    counts = mesh.pipeline.gathered(len(optimizer.param_groups))
    if len(set(counts)) > 1:
        raise ConfigError(
            f"the pipeline's stages have {', '.join(map(str, counts))} groups of parameters, and "
            "--fp16, SGD and offloaded states at ZeRO 1 need the same number: use --bf16 or "
            "--zero-stage 0, or give each stage a block with experts, and parameters that the "
            "patterns of --lr-group, --wd-group and their like match"
        )


def set_rates(
    optimizer: Optimizer, lr: float, weight_decay: float, decoupled_lr: float | None = None
) -> None:
    """Sets the learning rate of all groups, times their factors, and the decay of those that
    decay. ``decoupled_lr`` is that of embedding and output layer, if they have their own."""
    for group in optimizer.param_groups:
        decoupled = decoupled_lr is not None and group.get("decoupled")
        rate = decoupled_lr if decoupled else lr
        group["lr"] = rate * group.get("lr_factor", 1.0)
        group["weight_decay"] = (
            weight_decay * group.get("wd_factor", 1.0) if group["decays"] else 0.0
        )


def _keep_compiler_out() -> None:
    """Keeps methods of torch's optimizers from importing the compiler; called before one is made.
    On their first call they import it for a version of themselves that it will not trace, and keep
    that version. Nothing here traces an optimizer, so the method itself becomes that version."""
    for method in (
        Optimizer.add_param_group,
        Optimizer.zero_grad,
        Optimizer.state_dict,
        Optimizer.load_state_dict,
    ):
        function = getattr(method, "__wrapped__", None)
        if function is not None and not hasattr(function, _UNTRACED):
            setattr(function, _UNTRACED, function)


def _keep_compiler_from_steps(optimizer: Optimizer) -> None:
    """Keeps this optimizer's ``step`` from importing the compiler. torch wraps ``step`` to disable
    gradients and to tell the compiler where a graph ends. This wrapper only disables gradients;
    hooks and the name in profiles stay."""
    plain: Any = torch.no_grad()(inspect.unwrap(type(optimizer).step))
    hooked = Optimizer.profile_hook_step(plain)
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]


_ROW = 1024
"""Number of squares that are summed in float32, on CPUs; sums of rows are in float64."""

_ROWS = 256
"""Rows per call."""


def owned(param: nn.Parameter, mesh: Mesh, among: Sequence[str]) -> bool:
    """True if this rank's copy of a parameter counts in the norm of the gradients and in
    checkpoints. Only one copy counts along the axes ``among``: ``SHARDED`` for sums over the ranks
    of one replica, ``MODEL`` where each replica has its own part, ``AXES`` for one of all ranks."""
    # DeepSpeed marks the copies of tied parameters on pipeline stages after the first.
    replicated = getattr(param, "ds_pipe_replicated", False)
    return not replicated and shard_of(param).counted(mesh.coordinates, among)


def fewer_replicas(params: Iterable[nn.Parameter], mesh: Mesh) -> list[nn.Parameter]:
    """Parameters cut over more than one rank along the axis ``expert``: gradients are summed
    over fewer ranks than those of dense layers, and ZeRO partitions them among fewer."""
    return [p for p in params if mesh.replicas(shard_of(p)).size < mesh.dense.size]


def partition_ranks(wrapper: Any, mesh: Mesh) -> list[int]:
    """This process's place among the ranks that share each group of parameters of DeepSpeed's
    optimizer of stage 1 or 2."""
    return [mesh.replicas(shard_of(params[0])).rank for params in wrapper.bit16_groups]


@torch.no_grad()
def average_gradients(params: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Averages gradients over all replicas, in place. Each is summed over the axes along which its
    parameter is replicated; the gradient of a parameter that is cut over ``expert`` already
    includes the tokens of other ranks along it."""
    for param in params:
        if param.grad is not None and mesh.dense.size > 1:
            group = mesh.replicas(shard_of(param))
            if group.size > 1:
                dist.all_reduce(param.grad, group=group.handle)
            param.grad /= mesh.dense.size


@torch.no_grad()
def gradient_norm(params: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """2-norm over all gradients of the whole model, each counted once (float32, or float64 for
    float64 gradients). ``params`` are all of this rank, gradients averaged over the replicas."""
    dtypes = {param.grad.dtype for param in params if param.grad is not None}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    grads = [p.grad for p in params if p.grad is not None and owned(p, mesh, SHARDED)]
    return norm_of_groups([grads], wide, wide, [mesh.group(*SHARDED)], params[0].device)


@torch.no_grad()
def norm_of_groups(
    grads: Sequence[Sequence[Tensor]],
    sums: torch.dtype,
    result: torch.dtype,
    groups: Sequence[Group],
    device: torch.device,
) -> Tensor:
    """2-norm over groups of gradients, without copies in another dtype; not finite where any
    gradient is not.

    Args:
        sums: dtype in which a gradient's squares are summed.
        result: dtype of the numbers that travel between ranks, and of the norm.
        groups: ranks with different gradients; sums are added over one group after the other.
    """
    squares_G = torch.stack([_sum_of_squares(part, sums, device) for part in grads]).to(result)
    for group in groups:
        if group.size > 1:
            dist.all_reduce(squares_G, group=group.handle)
    return torch.linalg.vector_norm(squares_G.sqrt())


def _sum_of_squares(grads: Sequence[Tensor], sums: torch.dtype, device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu" and sums == torch.float32:
        norms = torch.cat([part for grad in grads for part in _norms_of_rows(grad)])
    else:
        norms = torch.stack(torch._foreach_norm(list(grads), 2, dtype=sums))
    return norms.to(torch.float64).pow(2).sum()


def _norms_of_rows(grad: Tensor) -> list[Tensor]:
    """torch sums the squares of a whole CPU tensor sequentially: in float32 a million of them lose
    four digits, and float64 takes three times as long. A row at a time loses nothing relevant."""
    flat = grad.reshape(-1)
    end = flat.numel() // _ROW * _ROW
    # torch copies 16-bit numbers to float32 first: parts that stay in a core's cache.
    parts = [*flat[:end].view(-1, _ROW).split(_ROWS), flat[end:].view(1, -1)]
    return [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts if part.numel()
    ]


def clipping_factor(norm: Tensor, largest: float) -> Tensor:
    """Factor of gradients that makes their norm at most ``largest``."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)
