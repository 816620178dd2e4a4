"""The optimizer that DeepSpeed's engine wraps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megatron.config import OptimizerConfig
from megatron.engine.uncompiled import keep_compiler_from_optimizers, keep_compiler_from_steps
from megatron.parallel.shard import shard_of


def build_optimizer(
    params: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups: matrices, which decay, and vectors, which do not.

    Args:
        params: parameters with shard descriptions.
        config: optimizer values; the schedule sets learning rate and decay before every step.
    """
    keep_compiler_from_optimizers()
    optimizer = _optimizer(params, config)
    keep_compiler_from_steps(optimizer)
    return optimizer


def _optimizer(params: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
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


def set_rates(optimizer: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """Sets the learning rate of all groups and the decay of those that decay."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0
