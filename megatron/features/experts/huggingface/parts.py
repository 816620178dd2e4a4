"""Parts of the tables of Hugging Face's architectures with experts: entries of routers and experts,
and their keys in config.json.

`transformers` 4 has one tensor for each projection of each expert; in memory `transformers` 5 has
one for all experts, gate and up together, and writes either. A folder is read in both ways, and
written in the first.

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
    """Number of experts of a block; 0 where its MLP is dense."""
    return model.part(ExpertsConfig).experts_of(n)


def dense_in(model: ModelConfig, n: int) -> int:
    """1 for a block whose MLP is dense, in a model with experts."""
    return not experts_in(model, n)


def has_dense(model: ModelConfig) -> bool:
    """True if the MLP of some block is dense."""
    return model.part(ExpertsConfig).layers < model.num_layers


def router(theirs: str) -> tuple[Entry, ...]:
    """The router's weight [E, H]."""
    return (Entry("mlp.router.weight", (theirs,), at=experts_in),)


def correction(theirs: str, form: Reordering = SAME) -> tuple[Entry, ...]:
    """The corrections [E] of the experts' scores in the choice, float32."""
    return (Entry("mlp.router.expert_bias", (theirs,), form, at=experts_in, exact=True),)


def fused_experts(up: str, down: str, module: str) -> tuple[Entry, ...]:
    """Experts in two tensors, gate and up [E, 2F, H] and down [E, H, F]; ``module`` has them in
    models of `transformers` 5."""
    return (
        Entry(UP, (up,), at=experts_in, parameter=f"{module}.gate_up_proj"),
        Entry(DOWN, (down,), at=experts_in, parameter=f"{module}.down_proj"),
    )


def experts(
    prefix: str, gate: str, up: str, down: str, fused: str = "mlp.experts"
) -> tuple[Entry, ...]:
    """Experts in three tensors each, below ``prefix``; or in two, below ``fused``."""
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
"""Experts whose projections have the names of Llama's MLP."""


def mlp_weights(ours: str, theirs: str, **fields: Any) -> tuple[Entry, ...]:
    """The weights of an MLP in some blocks."""
    entries = (entry for entry in gated_mlp(ours, theirs) if entry.ours.endswith("weight"))
    return tuple(dataclasses.replace(entry, **fields) for entry in entries)


DENSE = mlp_weights("mlp", "mlp", at=dense_in, when=has_dense)
"""The MLP of blocks without experts."""


def shared_experts(theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """The MLP of all tokens next to the experts."""
    return mlp_weights("mlp.shared", theirs, at=experts_in, when=when)


def natural(given: HFConfigReader, name: str, least: int = 0) -> int:
    """An integer that can be zero, or ``least``."""
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
    """The flags of the experts that a config.json describes.

    `transformers` computes one balancing loss from the tokens of all layers together, which is K at
    perfect balance, the number of choices of a token. Ours is a loss of each layer, 1 at perfect
    balance, and they are added up: for a gradient of the same size its coefficient is K times
    theirs, divided by the number of layers with experts.

    Args:
        fields: other fields, ``moe_router_topk`` included.
        number: the key of the number of experts.
        sparse: for each block, True if it has experts; empty if all have.
        coefficient: the key of the balancing loss's coefficient; None without such a loss.
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
    """The inverse of :func:`read_experts`; other balancing losses have no key."""
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
    """For each block, True if it has experts, by ``mlp_layer_types``; ``default`` where a file
    lacks it. Raises CheckpointError if it is another list."""
    kinds = given.names("mlp_layer_types") or default
    if len(kinds) != len(default) or not {"sparse"} <= {*kinds} <= {"dense", "sparse"}:
        given.refuse(
            "mlp_layer_types", kinds, f"expected dense or sparse for each of {len(default)} "
            "blocks, and one at least that is sparse"
        )  # fmt: skip
    return [kind == "sparse" for kind in kinds]


def write_mlp_kinds(model: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_mlp_kinds`."""
    kinds = ["sparse" if experts_in(model, n) else "dense" for n in range(model.num_layers)]
    return {"mlp_layer_types": kinds}


def read_normalisation(
    given: HFConfigReader, fields: dict[str, Any], summing: bool | None = None
) -> dict[str, Any]:
    """True if the weights of a token's experts sum up to 1, by ``norm_topk_prob`` unless it is
    known. Then their softmax over all experts, divided by their sum, is that over the chosen ones.
    """
    summing = given.flag("norm_topk_prob") if summing is None else summing
    if summing and fields["moe_router_topk"] == 1:
        given.refuse(
            "num_experts_per_tok", 1,
            "the only weight of a token is always 1, so that the router is not trained",
        )  # fmt: skip
    return {"moe_router_pre_softmax": not summing}


def normalised(model: ModelConfig) -> bool:
    """True if the weights of a token's experts sum up to 1."""
    part = model.part(ExpertsConfig)
    if part.moe_router_normalize is not None:
        return part.moe_router_normalize
    return not part.moe_router_pre_softmax


_ANY = {
    "num_experts", "moe_layer_freq", "expert_interval", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_router_pre_softmax", "moe_router_normalize", "moe_router_dtype", "moe_input_jitter_eps",
}  # fmt: skip
"""Flags that each architecture reads or has a requirement for, or that change no logits but by
rounding."""


_PLAIN = {"moe_gate": "megatron", "moe_min_capacity": 0}
"""Values of models without the flags, where these are derived."""


def requirements(
    *allowed: str, dense: bool = False, summing: bool = False
) -> tuple[Requirement, ...]:
    """Requirements on the flags of experts.

    Args:
        allowed: flags that the architecture has and others do not.
        dense: True if blocks may have an MLP instead of experts.
        summing: True if the weights of a token's experts always sum up to 1.
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
