"""Builds the optimizer that DeepSpeed's engine wraps, and computes the gradient norm. torch's
optimizers import torch's compiler, only to keep it from tracing them, which takes as much CPU time
as importing torch. This module avoids that import, except at ZeRO 3, which imports the compiler
itself. If a later torch works differently, runs only start more slowly."""

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
"""DeepSpeed's group name for parameters with fewer replicas than dense layers."""

# Name of the attribute with a method's version that torch's compiler does not trace.
_UNTRACED = "__dynamo_disable"


Names = Mapping[nn.Parameter, str]
"""Canonical name of each trained parameter."""


class Factors(NamedTuple):
    """Factors by which a parameter's hyperparameters differ from the flags' values.

    Attributes:
        rate: factor of the learning rate, including its minimum.
        decay: factor of the weight decay, if the parameter decays.
        epsilon: factor of ``--adam-eps``.
        decoupled: whether the learning rate is ``--decoupled-lr``.
        decays: whether the parameter decays; None for the default, by which only matrices do.
    """

    rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0
    decoupled: bool = False
    decays: bool | None = None

    def times(self, other: Factors) -> Factors:
        """Return these factors with rate, decay and epsilon multiplied by those in ``other``."""
        return self._replace(
            rate=self.rate * other.rate,
            decay=self.decay * other.decay,
            epsilon=self.epsilon * other.epsilon,
        )


class OptimizerPlan(NamedTuple):
    """Optimizer that a feature implements.

    Attributes:
        rules: name of the update rule of each parameter, also the key ``rule`` of parameter groups.
        factors: learning rate factor of each rule whose factor is not 1.
        make: builds the optimizer from parameter groups and default values.
    """

    rules: Mapping[nn.Parameter, str]
    factors: Mapping[str, float]
    make: Callable[[list[dict[str, Any]], dict[str, Any]], Optimizer]


def factors_of(
    names: Names, config: RunConfig, rules: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> dict[nn.Parameter, Factors]:
    """Return each parameter's factors, combined over all features. Empty, on every rank, if no
    feature has any. For ``rules`` see :class:`OptimizerPlan`."""
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
    """Build AdamW, SGD or the optimizer of ``plan`` with two parameter groups: matrices, which
    decay, and vectors, which do not. There are two groups for each combination of ``factors`` (1 by
    default) and the plan's rules, and as many again for the parameters ``apart`` (see
    :func:`fewer_replicas`). ``cut`` splits a group into several. With a plan, groups split from one
    have the same number under ``together``: one call updates them, so that a rule can divide its
    work among ranks. The schedule sets learning rate and weight decay before every step."""
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
            # DeepSpeed's keys for groups that are partitioned among other ranks.
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
            fused=True,  # torch's own kernel, also for CPUs; nothing is compiled
        )
    _keep_compiler_from_steps(optimizer)
    return optimizer


def _plain(factors: Factors) -> Factors:
    return factors._replace(decays=None)


def check_groups(optimizer: Optimizer, mesh: Mesh) -> None:
    """Raise ConfigError if pipeline stages have different numbers of parameter groups. DeepSpeed's
    own step exchanges a number for each group. Collective."""
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
    """Set each group's learning rate, including its factor, and the weight decay of groups that
    decay. ``decoupled_lr`` is the rate of embedding and output layer, if it is separate. Every
    group also has ``lr``, the rate of most groups, as ``common_lr``."""
    for group in optimizer.param_groups:
        group["common_lr"] = lr
        decoupled = decoupled_lr is not None and group.get("decoupled")
        rate = decoupled_lr if decoupled else lr
        group["lr"] = rate * group.get("lr_factor", 1.0)
        group["weight_decay"] = (
            weight_decay * group.get("wd_factor", 1.0) if group["decays"] else 0.0
        )


def _keep_compiler_out() -> None:
    """Keep methods of torch's optimizers from importing the compiler. Called before an optimizer is
    built. On its first call, each method imports the compiler to get and cache an untraced version
    of itself. Nothing in this project traces optimizers, so the method itself is cached instead."""
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
    """Keep this optimizer's ``step`` from importing the compiler. torch wraps ``step`` to disable
    gradients and to tell the compiler where a graph ends. The replacement only disables gradients.
    Hooks and the name in profiles stay the same."""
    plain: Any = torch.no_grad()(inspect.unwrap(type(optimizer).step))
    hooked = Optimizer.profile_hook_step(plain)
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]


_ROW = 1024
"""Length of the rows whose squares are summed in float32 on CPUs; row sums are added in float64."""

_ROWS = 256
"""Number of rows per call."""


def owned(param: nn.Parameter, mesh: Mesh, among: Sequence[str]) -> bool:
    """Return whether this rank's copy of a parameter counts in the gradient norm and in
    checkpoints. Only one copy counts along the axes ``among``: ``SHARDED`` for sums over the ranks
    of one replica, ``MODEL`` if each replica has its own shard, ``AXES`` for a single copy."""
    # DeepSpeed marks copies of tied parameters on pipeline stages after the first.
    replicated = getattr(param, "ds_pipe_replicated", False)
    return not replicated and shard_of(param).counted(mesh.coordinates, among)


def fewer_replicas(params: Iterable[nn.Parameter], mesh: Mesh) -> list[nn.Parameter]:
    """Return the parameters that are sharded along the ``expert`` axis. Their gradients are summed,
    and ZeRO partitions them, over fewer ranks than in dense layers."""
    return [p for p in params if mesh.replicas(shard_of(p)).size < mesh.dense.size]


@torch.no_grad()
def gradient_norm(params: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """Return the 2-norm of the whole model's gradients, each counted once. It is float32, or
    float64 for float64 gradients. ``params`` are all parameters of this rank, whose gradients have
    been averaged over the replicas. Collective."""
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
    """Return the 2-norm over groups of gradients, without copies in another dtype. It is not finite
    if any gradient is not. Collective.

    Args:
        sums: dtype in which the squares of a gradient are summed.
        result: dtype of the values exchanged between ranks, and of the norm.
        groups: process groups whose ranks have different gradients, reduced one after another.
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
    """Return the norms of rows of a CPU gradient. torch sums squares sequentially on CPUs: with a
    million of them, float32 loses four digits and float64 takes three times as long. Summing rows
    first avoids both."""
    flat = grad.reshape(-1)
    end = flat.numel() // _ROW * _ROW
    # torch first copies 16-bit numbers to float32. Copies of this size fit into a core's cache.
    parts = [*flat[:end].view(-1, _ROW).split(_ROWS), flat[end:].view(1, -1)]
    return [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts if part.numel()
    ]


def clipping_factor(norm: Tensor, largest: float) -> Tensor:
    """Return the factor that scales gradients to a norm of at most ``largest``."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)
