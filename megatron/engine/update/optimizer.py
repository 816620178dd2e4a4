"""The optimizer that DeepSpeed's engine wraps. torch's optimizers import its compiler
(torch._dynamo, torch._inductor) to keep it from tracing them, which takes as much CPU time as
importing torch. If a later torch does this in another way, starts only become slower. ZeRO 3
imports the compiler nevertheless."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megatron.config import OptimizerConfig
from megatron.parallel.shard import shard_of

# Attribute with a method's version that torch's compiler does not trace (torch._compile).
_UNTRACED = "__dynamo_disable"


def build_optimizer(params: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """AdamW or SGD over two groups: matrices, which decay, and vectors, which do not. The schedule
    sets learning rate and decay before every step."""
    _keep_compiler_out()
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in params:
        (decayed if len(shard_of(param).full_shape) > 1 else others).append(param)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay, "decays": True},
        {"params": others, "weight_decay": 0.0, "decays": False},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: Optimizer
    if config.optimizer == "sgd":
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


def set_rates(optimizer: Optimizer, lr: float, weight_decay: float) -> None:
    """Sets the learning rate of all groups and the decay of those that decay."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


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
