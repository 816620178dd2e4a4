"""Common code of the Hugging Face architectures with experts: weight mappings of routers and
experts, and their keys in config.json.

`transformers` 4 has one tensor for each projection of each expert. `transformers` 5 keeps all
experts in one tensor in memory, with gate and up fused, and writes either form. Both forms are
read; checkpoints are written in the form of `transformers` 4.

Shapes: E experts, F inner width of an expert, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.config import ModelConfig
from megatron.config.patterns import pattern_text
from megatron.features.experts.flags import ExpertsConfig
from megatron.formats.features import Requirement, spelled
from megatron.formats.huggingface.config_reader import HFConfigReader, Names, short
from megatron.formats.huggingface.entries import (
    GATE_AND_UP,
    SAME,
    Condition,
    Entry,
    Reordering,
    always,
)
from megatron.formats.huggingface.llama import gated_mlp

CHOICES = {"num_experts_per_tok": "moe_router_topk"}
INNER = {"moe_intermediate_size": "moe_ffn_hidden_size"}
UP, DOWN = "mlp.experts.up.weight", "mlp.experts.down.weight"


def experts_in(model: ModelConfig, n: int) -> int:
    """Return the number of experts of a block; 0 if its MLP is dense."""
    return model.part(ExpertsConfig).experts_of(n)


def dense_in(model: ModelConfig, n: int) -> int:
    """Return 1 if a block has a dense MLP, else 0."""
    return not experts_in(model, n)


def has_dense(model: ModelConfig) -> bool:
    """Return whether some block has a dense MLP."""
    return model.part(ExpertsConfig).layers < model.num_layers


def router(theirs: str) -> tuple[Entry, ...]:
    """Return the entry of the router's weight [E, H]."""
    return (Entry("mlp.router.weight", (theirs,), at=experts_in),)


def correction(theirs: str, form: Reordering = SAME) -> tuple[Entry, ...]:
    """Return the entry of the float32 corrections [E] that scores get when choosing experts."""
    return (Entry("mlp.router.expert_bias", (theirs,), form, at=experts_in, exact=True),)


def fused_experts(up: str, down: str, module: str) -> tuple[Entry, ...]:
    """Return the entries of experts stored in two tensors, gate and up [E, 2F, H] and down [E, H,
    F]. ``module`` is the path of their module in `transformers` 5."""
    return (
        Entry(UP, (up,), at=experts_in, parameter=f"{module}.gate_up_proj"),
        Entry(DOWN, (down,), at=experts_in, parameter=f"{module}.down_proj"),
    )


def experts(
    prefix: str, gate: str, up: str, down: str, fused: str = "mlp.experts"
) -> tuple[Entry, ...]:
    """Return the entries of experts stored as three tensors each under ``prefix``. The alternative
    form, two tensors for all experts under ``fused``, is accepted too."""
    forms = ((gate, up), GATE_AND_UP), ((down,), SAME)
    whole = fused_experts(f"{fused}.gate_up_proj", f"{fused}.down_proj", fused)
    return tuple(
        dataclasses.replace(
            entry,
            theirs=tuple(f"{prefix}.{{e}}.{name}.weight" for name in names),
            form=form,
            slices=experts_in,
            others=(entry,),
        )
        for entry, (names, form) in zip(whole, forms, strict=True)
    )


LLAMA_EXPERTS = experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
"""Experts whose projections are named as in Llama's MLP."""


def mlp_weights(ours: str, theirs: str, **fields: Any) -> tuple[Entry, ...]:
    """Return the entries of an MLP's weights, which may exist in some blocks only."""
    entries = (entry for entry in gated_mlp(ours, theirs) if entry.ours.endswith("weight"))
    return tuple(dataclasses.replace(entry, **fields) for entry in entries)


DENSE = mlp_weights("mlp", "mlp", at=dense_in, when=has_dense)
"""MLP of blocks without experts."""


def shared_experts(theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """Return the entries of the shared experts, one MLP for all tokens."""
    return mlp_weights("mlp.shared", theirs, at=experts_in, when=when)


def natural(given: HFConfigReader, name: str, least: int = 0) -> int:
    """Return an integer that is at least ``least``. Raises CheckpointError if it is not."""
    value = given.content.get(name, given.default(name))
    given.unused(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        given.refuse(name, value, f"expected an integer, {least} or more")
    return value


def read_experts(
    given: HFConfigReader,
    fields: dict[str, Any],
    number: Names,
    sparse: Sequence[bool] = (),
    coefficient: str | None = "router_aux_loss_coef",
) -> dict[str, Any]:
    """Return the flags of the experts that a config.json describes.

    `transformers` computes one balancing loss from the tokens of all layers together. At perfect
    balance it is K, the number of choices of a token. This project adds up one loss per layer, each
    of which is 1 at perfect balance. For a gradient of the same size, the coefficient in
    `transformers` is multiplied by K and divided by the number of layers with experts.

    Args:
        fields: other fields, including ``moe_router_topk``.
        number: the key of the number of experts.
        sparse: for each block, True if it has experts; empty if all blocks do.
        coefficient: the key of the balancing loss's coefficient; None if the model has no such
            loss.
    """
    count, top = given.whole(number), fields["moe_router_topk"]
    if count == 1:
        given.refuse(number, count, "one expert is a dense MLP")
    if top is None or top > count:
        given.refuse("num_experts_per_tok", top, f"there are {count} experts")
    given.unused("output_router_logits")
    layers = sum(sparse) if sparse else fields["num_layers"]
    inner = fields.get("moe_ffn_hidden_size") or fields["ffn_hidden_size"]
    flags: dict[str, Any] = {"num_experts": (count,), "moe_ffn_hidden_size": inner}
    if not all(sparse):
        flags["moe_layer_freq"] = pattern_text(sparse)
    if coefficient is None:
        return flags | {"moe_router_load_balancing_type": ("none",)}
    loss = given.number(coefficient) * top / layers
    return flags | {
        "moe_router_load_balancing_type": ("aux_loss",),
        "moe_aux_loss_coeff": (loss,),
    }


def write_experts(
    model: ModelConfig, number: str, coefficient: str | None = "router_aux_loss_coef"
) -> dict[str, Any]:
    """Return the keys that :func:`read_experts` reads. Of the balancing losses, only aux_loss has a
    key."""
    part = model.part(ExpertsConfig)
    if coefficient is None:
        return {number: max(part.layer_experts)}
    kinds, coefficients = part.moe_router_load_balancing_type, part.moe_aux_loss_coeff
    ours = dict(zip(kinds, coefficients, strict=False)).get("aux_loss", 0.0)
    return {
        number: max(part.layer_experts),
        coefficient: short(ours * part.layers / part.moe_router_topk),
    }


def read_mlp_kinds(given: HFConfigReader, default: list[str]) -> list[bool]:
    """Return, for each block, whether it has experts, as given by ``mlp_layer_types`` or
    ``default`` if the key is absent. Raises CheckpointError if the list is not valid."""
    kinds = given.names("mlp_layer_types") or default
    if len(kinds) != len(default) or not {"sparse"} <= {*kinds} <= {"dense", "sparse"}:
        given.refuse(
            "mlp_layer_types", kinds, f"expected dense or sparse for each of {len(default)} "
            "blocks, and one at least that is sparse"
        )  # fmt: skip
    return [kind == "sparse" for kind in kinds]


def write_mlp_kinds(model: ModelConfig) -> dict[str, Any]:
    """Return the key that :func:`read_mlp_kinds` reads."""
    kinds = ["sparse" if experts_in(model, n) else "dense" for n in range(model.num_layers)]
    return {"mlp_layer_types": kinds}


def read_normalisation(
    given: HFConfigReader, fields: dict[str, Any], summing: bool | None = None
) -> dict[str, Any]:
    """Return the flag for the normalisation of weights. ``summing`` is True if the weights of a
    token's experts add up to 1; None reads ``norm_topk_prob``. A softmax over all experts that is
    divided by the sum of the chosen weights equals a softmax over the chosen experts.
    """
    summing = given.flag("norm_topk_prob") if summing is None else summing
    if summing and fields["moe_router_topk"] == 1:
        given.refuse(
            "num_experts_per_tok", 1,
            "the only weight of a token is always 1, so that the router is not trained",
        )  # fmt: skip
    return {"moe_router_pre_softmax": not summing}


def normalised(model: ModelConfig) -> bool:
    """Return whether the weights of a token's experts add up to 1."""
    part = model.part(ExpertsConfig)
    if part.moe_router_normalize is not None:
        return part.moe_router_normalize
    return not part.moe_router_pre_softmax


_ANY = {
    "num_experts", "moe_layer_freq", "expert_interval", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_router_pre_softmax", "moe_router_normalize", "moe_router_dtype", "moe_input_jitter_eps",
}  # fmt: skip
"""Flags that all architectures read or require, or that change logits only by rounding."""


_PLAIN = {"moe_gate": "megatron", "moe_min_capacity": 0}
"""Values of derived fields in models that do not use the flags."""


def requirements(
    *allowed: str, dense: bool = False, summing: bool = False
) -> tuple[Requirement, ...]:
    """Return the requirements of an architecture on the flags of experts.

    Args:
        allowed: fields that this architecture supports and others do not.
        dense: True if blocks may have a dense MLP instead of experts.
        summing: True if the weights of a token's experts always add up to 1.
    """

    def plain(field: dataclasses.Field[Any]) -> Requirement:
        value = _PLAIN.get(field.name, field.default)
        return Requirement(
            lambda model: getattr(model.part(ExpertsConfig), field.name) in (value, field.default),
            spelled(field.name, value),
        )

    def alike(model: ModelConfig) -> bool:
        return len({*model.part(ExpertsConfig).layer_experts} - {0}) == 1

    of_layers = [Requirement(alike, "--num-experts, the same in all layers with experts")]
    if not dense:
        of_layers.append(Requirement(lambda model: not has_dense(model), "--moe-layer-freq 1"))
    if summing:
        of_layers.append(Requirement(normalised, "no --moe-router-pre-softmax"))
    return (
        *of_layers,
        *(
            plain(field)
            for field in dataclasses.fields(ExpertsConfig)
            if field.metadata["role"] in ("weights", "results")
            and not field.metadata["internal"]
            and field.name not in _ANY.union(allowed)
        ),
    )
