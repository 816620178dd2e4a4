"""Derived values and consistency checks of the flags of experts.

Megatron-LM and Megatron-DeepSpeed have different flags and defaults for the same features. A bare
``--num-experts 8`` has Megatron-LM's meaning. A flag that only Megatron-DeepSpeed has
(:data:`DEEPSPEED_FLAGS`) selects its gates, and its defaults for all flags that are not given, as
its scripts expect. If flags of both projects are given, ``--moe-gate`` must select whose gate is
used; the defaults are then those of ``--help``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from megatron.config.flags import ConfigError, ConfigResolver
from megatron.config.patterns import every_first, layer_pattern
from megatron.features.experts.fields import LOSSES, ExpertsFlags

Part = TypeVar("Part", bound=ExpertsFlags)

DEEPSPEED_FLAGS = (
    "--topk", "--moe-loss-coeff", "--moe-train-capacity-factor", "--moe-eval-capacity-factor",
    "--moe-min-capacity", "--expert-interval", "--mlp-type", "--disable-moe-token-dropping",
    "--disable-moe-top2-2nd-expert-sampling", "--moe-expert-parallel-size",
    "--enable-expert-tensor-parallelism",
)  # fmt: skip
"""Flags of Megatron-DeepSpeed that Megatron-LM does not have."""
_DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "moe_router_topk": 1,
    "moe_aux_loss_coeff": (0.1,),
    "moe_expert_capacity_factor": 1.0,
    "moe_eval_capacity_factor": 1.0,
    "moe_min_capacity": 4,
}
_WITH_CAPACITY = {"aux_loss", "seq_aux_loss", "none"}
_ALONE = {"sinkhorn", "quantile_balancing", "none"}


def resolve_experts(part: Part, layers: int, resolver: ConfigResolver) -> Part:
    """Resolve the flags of experts for a model of ``layers`` layers. Raises ConfigError if flags
    contradict each other."""
    if max(part.num_experts, default=0) < 2:
        if resolver.given("num_experts"):
            how = "one expert is a dense layer"
            resolver.notes.append(f"{resolver.show('num_experts')}: the model is dense")
            resolver.put("num_experts", (), how)
        return type(part)()
    values = _values(part, resolver)
    part = replace(part, **values)
    experts = _layer_experts(part, layers, resolver)
    part = replace(part, layer_experts=resolver.put("layer_experts", experts, "num-experts"))
    inner = resolver.values["ffn_hidden_size"]
    inner = resolver.fill("moe_ffn_hidden_size", part.moe_ffn_hidden_size, inner, "ffn-hidden-size")
    part = replace(part, moe_ffn_hidden_size=inner)
    resolver.check(
        not resolver.values["xielu"],
        f"--xielu contradicts {resolver.show('num_experts')}: experts have no factors of their own "
        "for it; choose another activation, or leave --num-experts out",
    )
    _check_choice(part, part.counts[0], resolver)
    _check_groups(part, resolver)
    _check_balancing(part, resolver)
    _check_capacity(part, resolver)
    resolver.check(
        part.mlp_type == "standard" or part.moe_shared_expert_intermediate_size is None,
        f"{resolver.show('mlp_type')} contradicts "
        f"{resolver.show('moe_shared_expert_intermediate_size')}: both are an MLP for every token "
        "next to the experts; give one of them",
    )
    return part


def _values(part: ExpertsFlags, resolver: ConfigResolver) -> dict[str, Any]:
    """Return the values of fields that the user did not set."""
    values: dict[str, Any] = {}
    flag = _deepspeed_flag(part, resolver)
    if flag is not None and not resolver.given("moe_gate"):
        other = next(_choice_flags(resolver), None)
        resolver.check(
            other is None,
            f"{flag} is Megatron-DeepSpeed's and {other} Megatron-LM's, and their routers and "
            "defaults differ: give flags of one of them, or --moe-gate megatron or --moe-gate "
            "deepspeed to say whose router it is, with the defaults of --help",
        )
        defaults = {"moe_gate": "deepspeed", **_DEEPSPEED_DEFAULTS}
        if part.moe_layer_freq is None:
            defaults["expert_interval"] = 2
        how = f"as Megatron-DeepSpeed, with {flag}"
        for name, value in defaults.items():
            if not resolver.given(name):
                values[name] = resolver.put(name, value, how)
    name = "moe_expert_capacity_factor"
    factor, gate = values.get(name, getattr(part, name)), values.get("moe_gate", part.moe_gate)
    if factor is None and gate == "deepspeed" and part.moe_token_dropping:
        values[name] = resolver.put(name, 1.0, "--moe-gate deepspeed")
    if factor is not None and factor <= 0:
        resolver.check(factor < 0, f"{resolver.show(name)} must be positive, or negative for none")
        values[name] = resolver.put(name, None, "negative: no limit")
    types = part.moe_router_load_balancing_type
    weights = values.get("moe_aux_loss_coeff", part.moe_aux_loss_coeff)
    if not weights:
        how = "no balancing loss"
        weights = resolver.put("moe_aux_loss_coeff", (0.0,) * len(types), how)
    return values | {"moe_aux_loss_coeff": weights}


def _deepspeed_flag(part: ExpertsFlags, resolver: ConfigResolver) -> str | None:
    """Return the first flag on the command line that only Megatron-DeepSpeed has, or None. It is
    also None if there is no command line, or if the model comes from a checkpoint, where flags are
    already resolved."""
    typed = resolver.origins["num_experts"].startswith("flag ") and not part.layer_experts
    if not typed or "expert_model_parallel_size" not in resolver.origins:
        return None
    flags = {origin.removeprefix("flag ") for origin in resolver.origins.values()}
    return next((flag for flag in DEEPSPEED_FLAGS if flag in flags), None)


def _choice_flags(resolver: ConfigResolver) -> Iterator[str]:
    """Yield the flags on the command line that configure Megatron-LM's router."""
    for name in (
        "moe_router_topk", "moe_aux_loss_coeff", "moe_expert_capacity_factor",
        "moe_token_drop_policy", "moe_router_load_balancing_type", *_OF_MEGATRON,
    ):  # fmt: skip
        typed = resolver.origins[name].removeprefix("flag ")
        if typed != resolver.origins[name] and typed not in DEEPSPEED_FLAGS:
            yield typed


def _layer_experts(part: ExpertsFlags, layers: int, resolver: ConfigResolver) -> tuple[int, ...]:
    """Return the number of experts of each layer, 0 for a dense layer."""
    freq, interval = part.moe_layer_freq, part.expert_interval
    resolver.check(
        freq is None or interval is None,
        f"{resolver.show('moe_layer_freq')} contradicts {resolver.show('expert_interval')}: the "
        "first counts layers from 0, the second from 1; give one of them",
    )
    if interval is not None:
        name, has_experts = "expert_interval", [n % interval == 0 for n in range(1, layers + 1)]
    else:
        name = "moe_layer_freq"
        has_experts = [*layer_pattern("--moe-layer-freq", freq or "1", layers, every_first)]
    count = sum(has_experts)
    resolver.check(
        count > 0,
        f"{resolver.show(name)}: none of {layers} layers has experts; choose another pattern, or "
        "leave --num-experts out",
    )
    numbers = part.num_experts
    resolver.check(
        len(numbers) in (1, count),
        f"{resolver.show('num_experts')}: {len(numbers)} numbers for {count} layers with experts; "
        "give one number, or one for each of them",
    )
    remaining = iter(numbers * count if len(numbers) == 1 else numbers)
    chosen = [next(remaining) if sparse else 0 for sparse in has_experts]
    return tuple(number if number > 1 else 0 for number in chosen)


_OF_MEGATRON = (
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_normalize",
    "moe_router_num_groups", "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor",
)  # fmt: skip
"""Fields that only Megatron-LM's router uses."""


def _check_choice(part: ExpertsFlags, smallest: int, resolver: ConfigResolver) -> None:
    """Raise ConfigError if a token chooses more experts than the smallest layer has, or if the
    routing rule cannot be trained."""
    k, shown = part.moe_router_topk, resolver.show("moe_router_topk")
    resolver.check(
        k <= smallest,
        f"{shown} is more than the {smallest} experts of a layer; choose fewer, or more "
        "--num-experts",
    )
    resolver.check(
        not part.moe_apply_probs_on_input or k == 1,
        f"--moe-apply-probs-on-input needs one expert per token, not {shown}",
    )
    if part.moe_gate != "megatron":
        for field in fields(part):
            resolver.check(
                field.name not in _OF_MEGATRON or getattr(part, field.name) == field.default,
                f"{resolver.show(field.name)} contradicts {resolver.show('moe_gate')}, whose "
                "scores and weights are its own; leave it out, or give --moe-gate megatron",
            )
        return
    softmax = part.moe_router_score_function == "softmax"
    after = not part.moe_router_pre_softmax or bool(part.moe_router_normalize)
    resolver.check(
        not (k == 1 and softmax and after) or "sinkhorn" in part.moe_router_load_balancing_type,
        f"{shown} with a softmax over the chosen experts: a token's only weight is always 1, and "
        "the router gets no gradient; give --moe-router-pre-softmax"
        + (" without --moe-router-normalize" if part.moe_router_normalize else ""),
    )
    resolver.check(
        softmax or not part.moe_router_pre_softmax,
        f"--moe-router-pre-softmax contradicts {resolver.show('moe_router_score_function')}; give "
        "one of them",
    )
    resolver.check(
        not (softmax and part.moe_router_enable_expert_bias) or part.moe_router_pre_softmax,
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid or "
        "sqrtsoftplus, or --moe-router-pre-softmax, as ERNIE 4.5: a softmax over the chosen "
        "experts has no scores before the choice",
    )


def _check_groups(part: ExpertsFlags, resolver: ConfigResolver) -> None:
    groups, best = part.moe_router_num_groups, part.moe_router_group_topk
    if groups is None:
        return
    shown, shown_best = map(resolver.show, ("moe_router_num_groups", "moe_router_group_topk"))
    if best is None:
        raise ConfigError(f"{shown} needs --moe-router-group-topk, the groups that a token uses")
    resolver.check(best <= groups, f"{shown_best} is more than {shown}")
    k, shown_k = part.moe_router_topk, resolver.show("moe_router_topk")
    for experts in part.counts:
        resolver.check(
            experts % groups == 0,
            f"{shown} must divide the experts of every layer, and one has {experts}",
        )
        resolver.check(
            experts // groups * best >= k,
            f"{shown_best} of {shown} have {experts // groups * best} of {experts} experts, fewer "
            f"than {shown_k}; choose more groups",
        )
    resolver.check(
        k % best == 0 or part.moe_router_group_score == "max",
        f"{shown_best} must divide {shown_k}: a group's score is the sum of its best choices per "
        "group; or give --moe-router-group-score max",
    )


def _check_balancing(part: ExpertsFlags, resolver: ConfigResolver) -> None:
    types, weights = part.moe_router_load_balancing_type, part.moe_aux_loss_coeff
    shown, shown_weights = map(
        resolver.show, ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    )
    resolver.check(len(set(types)) == len(types), f"{shown} has a type twice; leave one out")
    resolver.check(
        len(types) == 1 or not _ALONE & set(types),
        f"{shown}: {' or '.join(sorted(_ALONE))} cannot be combined with another; give one type",
    )
    resolver.check(
        len(weights) == len(types),
        f"{shown_weights} must have one weight for each type of {shown}, {len(types)} in all",
    )
    resolver.check(
        types[0] in LOSSES or not any(weights),
        f"{shown_weights} weighs a loss, and {shown} has none; leave one of them out",
    )
    typed = resolver.origins["num_experts"].startswith("flag ")
    balanced = types[0] not in LOSSES or any(weights) or part.moe_router_enable_expert_bias
    if typed and not balanced:
        text = "nothing balances the experts: --moe-aux-loss-coeff is 0; 0.01 is usual"
        resolver.notes.append(text)
    for name in ("moe_gate", "moe_router_num_groups", "moe_router_enable_expert_bias"):
        resolver.check(
            types[0] in (*LOSSES, "none") or getattr(part, name) in (None, False, "megatron"),
            f"{shown} contradicts {resolver.show(name)}: both say how experts are chosen; leave "
            "one of them out",
        )


def _check_capacity(part: ExpertsFlags, resolver: ConfigResolver) -> None:
    name = "moe_expert_capacity_factor"
    if getattr(part, name) is None:
        name = "moe_eval_capacity_factor"
    if getattr(part, name) is None:
        return
    shown = resolver.show(name)
    resolver.check(
        part.moe_router_score_function == "softmax",
        f"{shown} contradicts {resolver.show('moe_router_score_function')}: an expert keeps the "
        "tokens with the largest probabilities, and only a softmax's compare; leave one of them "
        "out",
    )
    refused = set(part.moe_router_load_balancing_type) - _WITH_CAPACITY
    resolver.check(
        not refused,
        f"{shown} contradicts --moe-router-load-balancing-type {' '.join(sorted(refused))}: use "
        f"{', '.join(sorted(_WITH_CAPACITY))}, or leave the capacity out",
    )
    resolver.check(
        part.moe_gate != "sparsemixer",
        f"{shown} contradicts --moe-gate sparsemixer, which drops no token; leave one of them out",
    )
