"""Arguments of Megatron-LM, of Megatron-DeepSpeed and of its old SwitchMLP about experts, as fields
of :class:`ModelFlags`. The two programs mean different things by ``num_experts``: the first has a
number, None for a dense network, the second a list, ``[1]`` for a dense one.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig, ModelFlags
from megatron.config.flags import flag_of, value_type

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
"""Arguments of Megatron-LM that are fields here."""
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
"""Arguments of Megatron-DeepSpeed, and fields here."""
_REFUSED = ("moe_router_force_load_balancing", "moe_router_force_biased", "mos")
_NUMBERS = ("num_experts", "ds_num_experts", "num_moe_experts", "num_local_experts")
"""Names of the number of experts in forks, of which one is read."""
EXPERT_ARGUMENTS = frozenset({*_CORE, *_DEEPSPEED, *_DEEPSPEED.values(), "moe_router_bias"})
"""All names of arguments and fields here."""


def experts_of_arguments(arguments: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Fields of :class:`ModelFlags` about experts; none of a dense network. Raises CheckpointError
    if an argument is malformed, or changes the network in a way that cannot be represented."""
    numbers = {name: arguments.get(name) for name in _NUMBERS}
    for name in EXPERT_ARGUMENTS:
        arguments.get(name)  # without experts they have no effect
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
        # Every layer; a linear layer with a bias, and the probability of the expert that it takes.
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
        # Its router has a bias where linear layers have, and so have its experts.
        fields["moe_router_bias"] = arguments.get("add_bias_linear") or None
    fields["num_experts"] = number
    return {n: _value(n, value, where) for n, value in fields.items() if value is not None}


def _has_experts(number: Any) -> bool:
    several = number if isinstance(number, list | tuple) else [number]
    return any(isinstance(each, int) and each > 1 for each in several)


def _value(name: str, value: Any, where: Path) -> Any:
    """A value of the type that a field has."""
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
    """Inverse of :func:`experts_of_arguments`, in the words of Megatron-LM; empty for a dense
    network. Raises ValueError if Megatron-LM has no such network."""
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
    """Arguments in the words of Megatron-DeepSpeed."""
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
"""Fields from which the experts of each layer follow, ``layer_experts``."""


def _require_same(model: ModelConfig, written: dict[str, Any], program: str) -> None:
    """Raises ValueError if the arguments describe another network."""
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
