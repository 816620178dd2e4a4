"""The optimizer that DeepSpeed's engine wraps.

Torch's optimizers import its compiler (torch._dynamo, torch._inductor) to keep it from tracing
them, which takes as much CPU time as importing torch. Where torch comes to do this in another way,
nothing here has an effect but that the start takes longer; tests/unit/engine/test_optimizer.py
notices. ZeRO 3 imports it all the same: it wraps hooks of its own at run time.
"""

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

# Where torch keeps a method's version that its compiler does not trace (torch._compile).
_UNTRACED = "__dynamo_disable"


def build_optimizer(params: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """AdamW or SGD over two groups: matrices, which decay, and vectors, which do not.

    Args:
        params: parameters with shard descriptions.
        config: optimizer values; the schedule sets learning rate and decay before every step.
    """
    _keep_compiler_out()
    optimizer = _optimizer(params, config)
    _keep_compiler_from_steps(optimizer)
    return optimizer


def _optimizer(params: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in params:
        (decayed if len(shard_of(param).full_shape) > 1 else others).append(param)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay, "decays": True},
        {"params": others, "weight_decay": 0.0, "decays": False},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,  # torch's own kernel, for CPUs too; nothing is compiled
    )


def set_rates(optimizer: Optimizer, lr: float, weight_decay: float) -> None:
    """Sets the learning rate of all groups and the decay of those that decay."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _keep_compiler_out() -> None:
    """Has methods of torch's optimizers not import the compiler; to be called before one is made.

    When first called they import it, ask it for a version of themselves that it will not trace, and
    keep that. Nothing here traces an optimizer, so the method itself is put there.
    """
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
    """Has this optimizer's ``step`` not import the compiler.

    torch wraps ``step`` to turn gradients off and to tell the compiler where a graph ends. Here it
    is wrapped again, to turn gradients off; its hooks and its name in profiles stay.
    """
    plain: Any = torch.no_grad()(inspect.unwrap(type(optimizer).step))
    hooked = Optimizer.profile_hook_step(plain)
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
