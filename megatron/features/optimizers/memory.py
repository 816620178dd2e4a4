"""Memory of optimizer states, computed parameter by parameter."""

from __future__ import annotations

import math

import torch

from megatron.config import RunConfig
from megatron.config.optimizer import STATES
from megatron.families import trained_spec
from megatron.features.optimizers.adam_mini import division
from megatron.features.optimizers.flags import OptimizersConfig
from megatron.features.optimizers.fused import is_matrix, parts_of, rows_of
from megatron.features.optimizers.table import OPTIMIZERS
from megatron.features.optimizers.whole import length_of
from megatron.model.layer_list import LayerStack
from megatron.parallel.shard import Shard, shard_of
from megatron.parallel.tensor_parallel import TensorParallel


def states_per_parameter(config: RunConfig) -> float:
    """Return the number of 4-byte state values that the optimizer keeps per weight, averaged over
    the trained parameters of a model on one process; 2 for AdamW. States are distributed like
    weights, except that those of a whole matrix are on one rank, for which this is an average."""
    name = config.optimizer.optimizer
    if name not in OPTIMIZERS:
        return float(len(STATES[name]))
    with torch.device("meta"):
        stack = LayerStack(trained_spec(config).layers(TensorParallel()), config.parallel)
    states = weights = 0.0
    for parameter, param in stack.canonical_parameters():
        if param.requires_grad:
            states += _states_of(config, parameter, param)
            weights += param.numel()
    return states / weights


def _states_of(config: RunConfig, name: str, param: torch.nn.Parameter) -> float:
    flags, optimizer, shard = (
        config.section(OptimizersConfig),
        config.optimizer.optimizer,
        shard_of(param),
    )
    count = param.numel()
    if optimizer == "adam_mini":
        width = config.model.attention.kv_channels
        return count + division(name, shard.canonical_shape, parts_of(shard), width).blocks
    if not OPTIMIZERS[optimizer].matrices:
        return count * {"lion": 1, "ademamix": 3}.get(optimizer, 2)
    if not is_matrix(name, shard):
        lion = optimizer != "soap" and flags.muon_scalar_optimizer == "lion"
        return count * (1 if lion else 2)
    if optimizer == "muon":
        return count
    method = flags.adaptive_muon_moment2_method
    if optimizer == "adaptive_muon" and method == "adamuon":
        return 2 * count
    return count + sum(_of_matrix(optimizer, m, n) for m, n in _matrices(config, name, shard))


def _of_matrix(optimizer: str, rows: int, columns: int) -> int:
    """Return the number of a matrix's state values besides its momentum: NorMuon's for the longer
    side, or SOAP's second moment, factors, bases and eigenvalues."""
    if optimizer == "adaptive_muon":
        return max(rows, columns)
    return rows * columns + sum(2 * side * side + side for side in (rows, columns))


def _matrices(config: RunConfig, name: str, shard: Shard) -> list[tuple[int, int]]:
    *experts, _, columns = shard.full_shape
    fused = [(length_of(rows), columns) for rows in rows_of(name, shard, config)]
    return fused * math.prod(experts)
