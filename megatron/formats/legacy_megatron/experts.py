"""Names and arguments of mixture of experts in checkpoints of Megatron and DeepSpeed.

Their files have a tensor for each expert, while a canonical parameter contains all experts in order
(E experts, F inner width, H hidden)::

    mlp.local_experts.3.dense_h_to_4h.weight                              Megatron's SwitchMLP
    mlp.experts.local_experts.3.linear_fc1.weight                         core: SequentialMLP
    mlp.experts.linear_fc1.weight3                                        core: GroupedMLP
    mlp.deepspeed_moe.experts.deepspeed_experts.3.dense_h_to_4h.weight    Megatron-DeepSpeed
    mlp.experts.3.up.weight                                               intermediate name here
    mlp.experts.up.weight [E, 2F or F, H]                                 canonical name

This file also maps the expert arguments of Megatron-LM, of Megatron-DeepSpeed and of the old
SwitchMLP to fields of :class:`ModelFlags`. ``num_experts`` has two meanings: in Megatron-LM it is a
number, None for a dense network, and in Megatron-DeepSpeed a list, ``[1]`` for a dense network.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig, ModelFlags
from megatron.config.flags import flag_of, value_type

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
"""Canonical names of an MoE layer's modules other than experts, by Megatron's names."""
TENSORS = {
    "mlp.router.expert_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_gate.weight",
}
"""Canonical names of tensors that are not a module's weight or bias, by Megatron's names."""
_LAYERS = {"dense_h_to_4h": "up", "linear_fc1": "up", "dense_4h_to_h": "down", "linear_fc2": "down"}
_THEIRS = re.compile(
    r"mlp\.(?:deepspeed_moe\.experts\.deepspeed_experts|(?:experts\.)?local_experts)"
    r"\.(?P<expert>\d+)\.(?P<layer>\w+)\.(?P<kind>weight|bias)"
)
_GROUPED = re.compile(r"mlp\.experts\.(?P<layer>\w+)\.(?P<kind>weight|bias)(?P<expert>\d+)")
_ONE = re.compile(r"(.*\bmlp\.experts)\.(\d+)(\.(?:up|down)\.(?:weight|bias))")
_ALL = re.compile(r".*\bmlp\.experts\.(?:up|down)\.(?:weight|bias)")


def rename_expert(name: str) -> str | None:
    """Return our name, within a block, for a tensor of an MoE layer. Return None for an unknown
    name."""
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
    """Return the canonical parameter that contains a single expert's parameter, and the expert's
    index. Return other names unchanged, with 0."""
    match = _ONE.fullmatch(name)
    return (name, 0) if match is None else (match[1] + match[3], int(match[2]))


def one_expert(name: str, number: int) -> str:
    """Insert an expert's index into a canonical name: the inverse of :func:`of_one_expert`."""
    return name.replace("mlp.experts.", f"mlp.experts.{number}.")


def core_expert_name(name: str) -> str | None:
    """Return the name in Megatron's core library: the inverse of :func:`rename_expert`. Return None
    if the name is not in an MoE layer, or if the library has no such parameter."""
    theirs = {ours: theirs for theirs, ours in TENSORS.items()}.get(name)
    return theirs or _spelled(name, _OF_CORE, "mlp.experts.local_experts", "linear_fc1 linear_fc2")


def deepspeed_expert_name(name: str) -> str | None:
    """Return the name in Megatron-DeepSpeed, or None in the same cases as
    :func:`core_expert_name`."""
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
    """Return whether a canonical name is that of a parameter that stacks all experts of a layer."""
    return _ALL.fullmatch(name) is not None


def require_experts(numbers: Collection[int], experts: int, name: str, where: Path) -> None:
    """Raise CheckpointError if ``numbers``, the indices of a parameter's experts in files, are not
    0 to ``experts`` - 1."""
    for number in sorted(set(range(experts)) - set(numbers)):
        raise CheckpointError(f"{where} has no expert {number} of the {experts} of {name}")
    if surplus := sorted(set(numbers) - set(range(experts))):
        raise CheckpointError(
            f"{where} has an expert {surplus[0]} of {name}, of which the network has {experts}"
        )


def cut_expert(values: Tensor, name: str, gated: bool, rank: int, size: int) -> Tensor:
    """Return a tensor-parallel rank's shard of one expert's slice of a canonical parameter."""
    if ".up." in name:
        parts = values.chunk(2) if gated else (values,)  # Each rank has rows of gate and of up.
        return torch.cat([part.chunk(size)[rank] for part in parts])
    return values.chunk(size, -1)[rank] if values.dim() > 1 else values


def join_expert(shares: Sequence[Tensor], name: str, shape: Sequence[int], gated: bool) -> Tensor:
    """Join one expert's slice of a canonical parameter, with the given shape, from tensor-parallel
    ranks' shards or copies, which may be flat. Raises CheckpointError if they do not fit."""
    if shares[0].numel() == math.prod(shape):  # every rank has a whole copy
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
    if ".up." in name and gated:  # Each rank has rows of gate and of up.
        halves = zip(*(share.chunk(2) for share in shares), strict=True)
        return torch.cat([part for half in halves for part in half])
    return torch.cat(list(shares), dim)


_CORE = (
    "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "moe_latent_size", "moe_apply_probs_on_input", "moe_router_topk",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_dtype",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_input_jitter_eps", "moe_expert_capacity_factor",
    "moe_token_drop_policy",
)  # fmt: skip
"""Arguments of Megatron-LM with the same name as a field."""
_DEEPSPEED = {
    "num_experts": "num_experts",
    "expert_interval": "expert_interval",
    "mlp_type": "mlp_type",
    "topk": "moe_router_topk",
    "moe_loss_coeff": "moe_aux_loss_coeff",
    "moe_train_capacity_factor": "moe_expert_capacity_factor",
    "moe_eval_capacity_factor": "moe_eval_capacity_factor",
    "moe_min_capacity": "moe_min_capacity",
    "moe_token_dropping": "moe_token_dropping",
    "moe_top2_2nd_expert_sampling": "moe_top2_2nd_expert_sampling",
}
"""Names of fields, by Megatron-DeepSpeed argument."""
_REFUSED = ("moe_router_force_load_balancing", "moe_router_force_biased", "mos")
_NUMBERS = ("num_experts", "ds_num_experts", "num_moe_experts", "num_local_experts")
"""Arguments with the number of experts in different forks. The first one that specifies experts
counts."""
EXPERT_ARGUMENTS = frozenset({*_CORE, *_DEEPSPEED, *_DEEPSPEED.values(), "moe_router_bias"})
"""Names of all arguments and fields that describe experts."""


def experts_of_arguments(arguments: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the fields of :class:`ModelFlags` for experts, or an empty dictionary for a dense
    network. Raises CheckpointError if an argument is malformed, or its effect cannot be
    represented."""
    numbers = {name: arguments.get(name) for name in _NUMBERS}
    for name in EXPERT_ARGUMENTS:
        arguments.get(name)  # mark as read; it has no effect in a dense network
    switch = arguments.get("num_experts_switch")
    if not switch and not any(map(_has_experts, numbers.values())):
        return {}
    refused = (
        _REFUSED if "num_experts" in ModelFlags.__dataclass_fields__ else (*numbers, *_REFUSED)
    )
    for name in refused:
        if arguments.get(name):
            raise CheckpointError(
                f"{where}: the network has {name} {arguments[name]!r}, which cannot be represented"
            )
    if switch:
        # Every layer has a SwitchMLP. Its router has a bias, and weighs by the chosen probability.
        theirs = {"num_experts": switch, "moe_router_topk": 1, "moe_layer_freq": 1}
        theirs |= {"moe_router_pre_softmax": True, "moe_router_bias": True}
        return {name: _value(name, value, where) for name, value in theirs.items()}
    number = next(value for value in numbers.values() if _has_experts(value))
    if isinstance(number, list | tuple):
        defaults = {"topk": 1, "expert_interval": 2}
        fields = {
            ours: arguments.get(name, defaults.get(name)) for name, ours in _DEEPSPEED.items()
        }
        fields["moe_gate"] = "deepspeed"
    else:
        fields = {name: arguments.get(name) for name in _CORE}
        # Megatron-LM's router and experts have biases if its linear layers do.
        fields["moe_router_bias"] = arguments.get("add_bias_linear") or None
    fields["num_experts"] = number
    return {n: _value(n, value, where) for n, value in fields.items() if value is not None}


def _has_experts(number: Any) -> bool:
    several = number if isinstance(number, list | tuple) else [number]
    return any(isinstance(each, int) and each > 1 for each in several)


def _value(name: str, value: Any, where: Path) -> Any:
    """Convert an argument's value to its field's type. Raises CheckpointError if it does not
    fit."""
    if name == "moe_layer_freq":
        return None if value == 1 else str(value)
    hint = typing.get_type_hints(ModelFlags)[name]
    several, kind = value if isinstance(value, list | tuple) else [value], value_type(hint)
    fits = {kind, int} if kind is float else {kind}
    if not several or {type(each) for each in several} - fits:
        raise CheckpointError(
            f"{where}: the argument {name} is {value!r:.100}; expected a value of type "
            f"{kind.__name__}"
        )
    return tuple(several) if typing.get_origin(hint) is tuple else several[0]


def arguments_of_experts(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron-LM's arguments for experts, or an empty dictionary for a dense network:
    the inverse of :func:`experts_of_arguments`. Raises ValueError if Megatron-LM has no such
    network."""
    flags: Any = model.flags()
    layers = getattr(flags, "layer_experts", ())
    if not layers:
        return {}
    numbers = {number for number in layers if number}
    if len(numbers) > 1 or flags.mlp_type != "standard":
        raise ValueError(
            "a checkpoint of Megatron requires one number of experts for all layers that have any, "
            "and no --mlp-type residual; to-deepspeed writes Megatron-DeepSpeed's"
        )
    written = {name: getattr(flags, name) for name in _CORE} | {
        "num_experts": numbers.pop(),
        "moe_layer_freq": 1 if all(layers) else [int(number > 0) for number in layers],
        "moe_grouped_gemm": False,
    }
    _require_same(model, written, "a checkpoint of Megatron")
    return written


def deepspeed_arguments_of_experts(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron-DeepSpeed's arguments for experts. Raises ValueError if it has no such
    network."""
    flags: Any = model.flags()
    layers = [n for n, number in enumerate(getattr(flags, "layer_experts", ()), 1) if number]
    if not layers:
        return {"num_experts": [1]}
    if layers != list(range(layers[0], model.num_layers + 1, layers[0])):
        raise ValueError(
            "Megatron-DeepSpeed requires experts in every N-th layer (--expert-interval), and here "
            f"layers {', '.join(map(str, layers))} have experts"
        )
    if flags.moe_gate != "deepspeed":
        raise ValueError(
            "Megatron-DeepSpeed requires a network that was trained with its gates (--topk, "
            "--moe-loss-coeff): others choose experts by another rule"
        )
    written = {name: getattr(flags, ours) for name, ours in _DEEPSPEED.items()} | {
        "num_experts": [flags.layer_experts[n - 1] for n in layers],
        "expert_interval": layers[0],
        "moe_loss_coeff": flags.moe_aux_loss_coeff[0],
    }
    _require_same(model, written, "Megatron-DeepSpeed")
    return written


_SAID_OTHERWISE = {"num_experts", "moe_layer_freq", "expert_interval"}
"""Fields that are not compared, since ``layer_experts`` (number of experts in each layer) has the
same information."""


def _require_same(model: ModelConfig, written: dict[str, Any], program: str) -> None:
    """Raise ValueError if the arguments ``written`` do not describe the experts of ``model``."""
    flags = model.flags()
    fields = {f.name: f for f in dataclasses.fields(flags) if _is_of_experts(f.name)}
    plain: dict[str, Any] = {name: field.default for name, field in fields.items()}
    biased = written | {"add_bias_linear": flags.add_bias_linear}
    again = experts_of_arguments(biased, Path(program))
    there = dataclasses.replace(flags, **plain | again).resolve().flags()
    for name in fields.keys() - _SAID_OTHERWISE:
        value = getattr(flags, name)
        if value != getattr(there, name):
            flag = flag_of(fields[name])
            raise ValueError(f"{program} requires another value of {flag} than {value}")


def _is_of_experts(field: str) -> bool:
    return field.startswith("moe_") or field in EXPERT_ARGUMENTS | {"topk", "layer_experts"}
