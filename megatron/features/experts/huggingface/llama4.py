"""Text model of Llama 4. Each token uses one routed expert, whose weight multiplies the expert's
input, and one shared expert. Most blocks have RoPE and chunked attention; the others have no RoPE
and full attention.

In checkpoint files, experts are [E, inputs, outputs], and RoPE rotates neighbouring channels.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.config.patterns import but_every_last, every_last, shortest
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.huggingface.deepseek import HAS_SHARED, ONE_SHARED, WHOLE_SHARED
from megatron.features.experts.huggingface.parts import (
    CHOICES,
    DOWN,
    UP,
    dense_in,
    experts_in,
    has_dense,
    mlp_weights,
    read_experts,
    requirements,
    router,
    shared_experts,
    write_experts,
)
from megatron.formats.features import Requirement
from megatron.formats.huggingface.config_reader import CHUNKED, FULL, HFConfigReader
from megatron.formats.huggingface.decoders.relatives import SIZES, relative, relative_entries
from megatron.formats.huggingface.entries import INTERLEAVED_QKV, TRANSPOSED, Entry


def _numbers(given: HFConfigReader, name: str, allowed: range, count: int | None) -> list[int]:
    """Return a list of ``count`` numbers in a range. It is empty if the key is null or absent."""
    value = given.content.get(name) or []
    given.unused(name)
    if (
        not isinstance(value, list)
        or any(type(each) is not int or each not in allowed for each in value)
        or (value and count not in (None, len(value)))
    ):
        many = "numbers" if count is None else f"{count} numbers"
        given.refuse(name, value, f"expected {many} from {allowed.start} to {allowed.stop - 1}")
    return value


def _attention(given: HFConfigReader, layers: int) -> dict[str, Any]:
    """Return the attention flags: which blocks have RoPE, which are chunked, and how blocks without
    RoPE scale their queries."""
    every = given.whole("no_rope_layer_interval")
    rotates = _numbers(given, "no_rope_layers", range(2), layers)
    rotates = rotates or [int((n + 1) % every != 0) for n in range(layers)]
    kinds = given.names("layer_types") or [CHUNKED if rope else FULL for rope in rotates]
    if len(kinds) != layers or not set(kinds) <= {CHUNKED, FULL}:
        given.refuse("layer_types", kinds, f"expected {CHUNKED} or {FULL} for {layers} blocks")
    size, chunked = given.optional_whole("attention_chunk_size"), [k == CHUNKED for k in kinds]
    if size is None and any(chunked):
        given.refuse("attention_chunk_size", None, f"layer_types has {CHUNKED}")
    tuned = given.content.get("attn_temperature_tuning", True)
    given.unused("attn_temperature_tuning")
    scale, floor = given.number("attn_scale"), given.whole("floor_scale")
    plain = [not rope for rope in rotates]
    fields: dict[str, Any] = {}
    if any(plain):
        fields["no_rope_freq"] = shortest(tuple(plain), every_last)
    if any(plain) and tuned and scale:
        fields |= {"attention_temperature": scale, "attention_temperature_floor": floor}
    if any(chunked):
        fields["attention_chunk_size"] = size
    if any(chunked) and not all(chunked):
        fields["window_attn_skip_freq"] = shortest(tuple(chunked), but_every_last)
    return fields


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, every = fields["num_layers"], given.whole("interleave_moe_layer_step")
    sparse = [(n + 1) % every == 0 for n in range(layers)]
    if given.content.get("moe_layers") is not None:
        chosen = _numbers(given, "moe_layers", range(layers), None)
        sparse = [n in chosen for n in range(layers)]
    given.unused("moe_layers", "router_aux_loss_coef", "router_jitter_noise")
    if not any(sparse):
        given.refuse("moe_layers", given.content.get("moe_layers"), "no block has experts")
    if fields["moe_router_topk"] != 1:
        why = "the weight multiplies an expert's input, which needs one expert of each token"
        given.refuse("num_experts_per_tok", fields["moe_router_topk"], why)
    return {
        **read_experts(given, fields, ("num_local_experts", "num_experts"), sparse, None),
        **_attention(given, layers),
        "moe_shared_expert_intermediate_size": fields["moe_ffn_hidden_size"],
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    layers, positions = range(model.num_layers), model.positions
    scale = positions.attention_temperature
    return {
        **write_experts(model, "num_local_experts", coefficient=None),
        "moe_layers": [n for n in layers if experts_in(model, n)],
        "no_rope_layers": [int(positions.rotates(n)) for n in layers],
        "layer_types": [FULL if window is None else CHUNKED for window in model.windows],
        # transformers requires a chunk size even if no block is chunked.
        "attention_chunk_size": model.attention.attention_chunk_size
        or positions.max_position_embeddings,
        "attn_temperature_tuning": scale is not None,
        "attn_scale": scale or 0.1,
        "floor_scale": positions.attention_temperature_floor,
    }


_SCORES = {
    "moe_router_score_function": "sigmoid", "moe_router_normalize": False,
    "moe_apply_probs_on_input": True,
}  # fmt: skip

LLAMA4 = relative(
    "Llama 4",
    "llama4_text",
    "Llama4ForCausalLM",
    relative_entries(
        qkv_form=INTERLEAVED_QKV,
        mlp=(
            *mlp_weights("mlp", "feed_forward", at=dense_in, when=has_dense),
            *router("feed_forward.router.weight"),
            *(
                Entry(ours, (theirs,), TRANSPOSED, at=experts_in, parameter=theirs)
                for ours, theirs in (
                    (UP, "feed_forward.experts.gate_up_proj"),
                    (DOWN, "feed_forward.experts.down_proj"),
                )
            ),
            *shared_experts("feed_forward.shared_expert"),
        ),
    ),
    keys=SIZES
    | CHOICES
    | {
        "intermediate_size": "moe_ffn_hidden_size",
        "intermediate_size_mlp": "ffn_hidden_size",
        "use_qk_norm": "qk_l2_norm",
    },
    fixed=_SCORES,
    features=(
        "layer_experts", "no_rope_freq", "attention_temperature", "attention_chunk_size",
        "window_attn_skip_freq",
    ),
    biases=("attention",),
    base=500_000.0,
    requirements=(
        *requirements(*_SCORES, "moe_shared_expert_intermediate_size", dense=True),
        WHOLE_SHARED,
        HAS_SHARED,
        ONE_SHARED,
        Requirement(
            lambda model: model.part(ExpertsConfig).moe_router_topk == 1, "--moe-router-topk 1"
        ),
    ),
    read=_read,
    write=_write,
    rewards=False,
)  # fmt: skip
"""Llama 4 Scout and Maverick. Heads have no norm with weights. Where RoPE is applied, queries and
keys are divided by their root mean square; elsewhere, queries are scaled by their position."""
