"""Checks the fast paths against the rest of a configuration."""

from __future__ import annotations

from megatron.config.draft import Draft, not_negative
from megatron.config.fast_paths import GRAPH_MODES

RECIPES = ("tensorwise", "rowwise")
_MULTIPLE = 16
"""What 8-bit products on GPUs need every width to be a multiple of."""


def derive_fast_paths(draft: Draft, world_size: int) -> None:
    """Checks in place; nothing is derived.

    Raises:
        ConfigError: naming flags, values and what would be right.
    """
    not_negative(draft, "logits_chunk_mib")
    draft.check(
        draft["torch_compile"] or not draft.given("torch_compile_mode"),
        f"{draft.show('torch_compile_mode')} has an effect with --torch-compile only",
    )
    if draft["torch_compile_mode"] in GRAPH_MODES:
        _graphs(draft)
    draft.check(
        draft["fp8_recipe"] in RECIPES,
        f"{draft.show('fp8_recipe')}: scales come from the values at hand, one per tensor or per "
        f"row; it must be one of {', '.join(RECIPES)}",
    )
    _kept_in_bf16(draft)
    if draft["fp8_format"] is None:
        draft.check(
            not draft.given("fp8_recipe"),
            f"{draft.show('fp8_recipe')} has an effect with --fp8-format only",
        )
        return
    draft.check(
        draft["bf16"],
        f"{draft.show('fp8_format')} needs --bf16: what is not multiplied in 8 bits is bfloat16",
    )
    _widths(draft)


def _graphs(draft: Draft) -> None:
    """Refuses CUDA graphs, which work at fixed places in memory, where places change or are in use
    for longer than one pass through the model."""
    instead = "choose default or max-autotune-no-cudagraphs"
    draft.check(
        draft["pipeline_model_parallel_size"] == 1,
        f"{draft.show('torch_compile_mode')}, {draft.show('pipeline_model_parallel_size')}: a CUDA "
        "graph would overwrite the activations of a micro batch by those of the next, and a "
        f"pipeline keeps those of several; {instead}",
    )
    draft.check(
        draft["zero_stage"] < 3,
        f"{draft.show('torch_compile_mode')}, {draft.show('zero_stage')}: a CUDA graph reads "
        "weights where they were when it was recorded, and stage 3 gathers them anew each time; "
        f"{instead}",
    )


def _kept_in_bf16(draft: Draft) -> None:
    kept, counts = (
        "first_last_layers_bf16",
        ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    )
    not_negative(draft, *counts)
    draft.check(
        not draft[kept] or draft["fp8_format"] is not None,
        "--first-last-layers-bf16 has an effect with --fp8-format only",
    )
    for name in counts:
        draft.check(
            draft[kept] or not draft.given(name),
            f"{draft.show(name)} has an effect with --first-last-layers-bf16 only",
        )
    draft.check(
        not draft[kept] or sum(draft[name] for name in counts) < draft["num_layers"],
        f"{draft.show(counts[0])} and {draft.show(counts[1])} leave none of "
        f"{draft.show('num_layers')} for {draft.show('fp8_format')}",
    )


def _widths(draft: Draft) -> None:
    """Refuses widths of a rank's share of a layer, and tokens, that 8-bit products cannot have."""
    ranks, width = draft["tensor_model_parallel_size"], draft["kv_channels"]
    heads, groups = draft["num_attention_heads"], draft["num_query_groups"]
    query, key = heads * width // ranks, max(1, groups // ranks) * width
    fused = query + 2 * key if groups >= ranks else 2 * key
    cut = "" if ranks == 1 else f" / {draft.show('tensor_model_parallel_size')}"
    sizes = {
        "hidden_size": draft["hidden_size"],
        "num_attention_heads": query,
        "num_query_groups": fused,
        "ffn_hidden_size": draft["ffn_hidden_size"] // ranks,
    }
    names = {
        "hidden_size": draft.show("hidden_size"),
        "num_attention_heads": f"{draft.show('num_attention_heads')} x "
        f"{draft.show('kv_channels')}{cut}",
        "num_query_groups": f"queries, keys and values of {draft.show('num_query_groups')} x "
        f"{draft.show('kv_channels')}{cut}",
        "ffn_hidden_size": f"{draft.show('ffn_hidden_size')}{cut}",
    }
    if draft["micro_batch_size"] is not None:
        sizes["tokens"] = draft["micro_batch_size"] * draft["seq_length"]
        names["tokens"] = f"{draft.show('micro_batch_size')} x {draft.show('seq_length')}"
    for name, size in sizes.items():
        draft.check(
            size % _MULTIPLE == 0,
            f"{draft.show('fp8_format')} needs sizes that are multiples of {_MULTIPLE}: "
            f"{names[name]} is {size}",
        )
