"""Names of mixture of experts in the files of Megatron and of DeepSpeed, which have a tensor for
each expert; canonical parameters have those of all experts, in order (E experts, F inner width, H
hidden).

::

    mlp.local_experts.3.dense_h_to_4h.weight                              Megatron's SwitchMLP
    mlp.experts.local_experts.3.linear_fc1.weight                         core: SequentialMLP
    mlp.experts.linear_fc1.weight3                                        core: GroupedMLP
    mlp.deepspeed_moe.experts.deepspeed_experts.3.dense_h_to_4h.weight    Megatron-DeepSpeed
    mlp.experts.3.up.weight                                               here, between those and
    mlp.experts.up.weight [E, 2F or F, H]                                 the canonical name
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError

_OF_CORE = {
    "mlp.router": "mlp.router",
    "mlp.shared_experts.linear_fc1": "mlp.shared.up",
    "mlp.shared_experts.linear_fc2": "mlp.shared.down",
    "mlp.fc1_latent_proj": "mlp.latent_in",
    "mlp.fc2_latent_proj": "mlp.latent_out",
}
_OF_DEEPSPEED = {
    "mlp.deepspeed_moe.gate.wg": "mlp.router",
    "mlp.mlp.dense_h_to_4h": "mlp.residual.up",
    "mlp.mlp.dense_4h_to_h": "mlp.residual.down",
    "mlp.coefficient": "mlp.coefficient",
}
MODULES = _OF_CORE | _OF_DEEPSPEED
"""Modules of a layer of experts apart from these: Megatron's name, canonical name."""
TENSORS = {
    "mlp.router.expert_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_gate.weight",
}
"""Names of tensors that are neither a weight nor a bias of a module."""
_LAYERS = {"dense_h_to_4h": "up", "linear_fc1": "up", "dense_4h_to_h": "down", "linear_fc2": "down"}
_THEIRS = re.compile(
    r"mlp\.(?:deepspeed_moe\.experts\.deepspeed_experts|(?:experts\.)?local_experts)"
    r"\.(?P<expert>\d+)\.(?P<layer>\w+)\.(?P<kind>weight|bias)"
)
_GROUPED = re.compile(r"mlp\.experts\.(?P<layer>\w+)\.(?P<kind>weight|bias)(?P<expert>\d+)")
_ONE = re.compile(r"(.*\bmlp\.experts)\.(\d+)(\.(?:up|down)\.(?:weight|bias))")
_ALL = re.compile(r".*\bmlp\.experts\.(?:up|down)\.(?:weight|bias)")


def rename_expert(name: str) -> str | None:
    """Name here, within a block, of one of a layer of experts; None for an unknown name."""
    if name in TENSORS:
        return TENSORS[name]
    module, _, kind = name.rpartition(".")
    if module in MODULES and kind in ("weight", "bias"):
        return f"{MODULES[module]}.{kind}"
    match = _THEIRS.fullmatch(name) or _GROUPED.fullmatch(name)
    if match is None or match["layer"] not in _LAYERS:
        return None
    return f"mlp.experts.{int(match['expert'])}.{_LAYERS[match['layer']]}.{match['kind']}"


def of_one_expert(name: str) -> tuple[str, int]:
    """The canonical name of an expert's parameter, and the number of the expert; of others the name
    and 0."""
    match = _ONE.fullmatch(name)
    return (name, 0) if match is None else (match[1] + match[3], int(match[2]))


def one_expert(name: str, number: int) -> str:
    """Inverse of :func:`of_one_expert`."""
    return name.replace("mlp.experts.", f"mlp.experts.{number}.")


def core_expert_name(name: str) -> str | None:
    """Inverse of :func:`rename_expert`, in the spelling of Megatron's core library; None for a name
    that is not of a layer of experts, or that it lacks."""
    theirs = {ours: theirs for theirs, ours in TENSORS.items()}.get(name)
    return theirs or _spelled(name, _OF_CORE, "mlp.experts.local_experts", "linear_fc1 linear_fc2")


def deepspeed_expert_name(name: str) -> str | None:
    """Names in the spelling of Megatron-DeepSpeed."""
    experts = "mlp.deepspeed_moe.experts.deepspeed_experts"
    return _spelled(name, _OF_DEEPSPEED, experts, "dense_h_to_4h dense_4h_to_h")


def _spelled(name: str, modules: Mapping[str, str], experts: str, layers: str) -> str | None:
    module, _, kind = name.rpartition(".")
    if match := _ONE.fullmatch(name):
        layer = dict(zip(("up", "down"), layers.split(), strict=True))[module.rpartition(".")[2]]
        return f"{experts}.{match[2]}.{layer}.{kind}"
    theirs = {ours: theirs for theirs, ours in modules.items()}.get(module)
    return theirs and f"{theirs}.{kind}"


def is_of_experts(name: str) -> bool:
    """True for the canonical name of a parameter of all experts of a layer."""
    return _ALL.fullmatch(name) is not None


def require_experts(numbers: Collection[int], experts: int, name: str, where: Path) -> None:
    """Raises CheckpointError unless there are all experts of a parameter, and no other."""
    for number in sorted(set(range(experts)) - set(numbers)):
        raise CheckpointError(f"{where} has no expert {number} of the {experts} of {name}")
    if surplus := sorted(set(numbers) - set(range(experts))):
        raise CheckpointError(
            f"{where} has an expert {surplus[0]} of {name}, of which the network has {experts}"
        )


def cut_expert(values: Tensor, name: str, gated: bool, rank: int, size: int) -> Tensor:
    """A tensor rank's share of one expert's part of a canonical parameter."""
    if ".up." in name:
        parts = values.chunk(2) if gated else (values,)  # each rank has rows of both
        return torch.cat([part.chunk(size)[rank] for part in parts])
    return values.chunk(size, -1)[rank] if values.dim() > 1 else values


def join_expert(shares: Sequence[Tensor], name: str, shape: Sequence[int], gated: bool) -> Tensor:
    """One expert's part, of this shape, of a canonical parameter, from the shares of tensor ranks
    or from whole copies, which may be flat. Raises CheckpointError if they do not fit."""
    if shares[0].numel() == math.prod(shape):  # not cut: the ranks have copies
        return shares[0].reshape(tuple(shape))
    local, dim = list(shape), 0 if ".up." in name else len(shape) - 1
    local[dim] //= len(shares)
    if (
        any(share.numel() != math.prod(local) for share in shares)
        or local[dim] * len(shares) != shape[dim]
    ):
        raise CheckpointError(
            f"{name} has {[tuple(share.shape) for share in shares]} on the tensor ranks of an "
            f"expert, but {tuple(shape)} by the configuration"
        )
    shares = [share.reshape(local) for share in shares]
    if ".up." in name and gated:  # each rank has rows of both
        halves = zip(*(share.chunk(2) for share in shares), strict=True)
        return torch.cat([part for half in halves for part in half])
    return torch.cat(list(shares), dim)
