"""Short names of layouts, and the corresponding flags."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from megatron.config import ConfigError
from megatron.config.layouts import (
    COMMUNICATIONS,
    GRADS_IN_FP32,
    PRECISIONS,
    RECOMPUTE,
    SCHEDULES,
    STATES,
    TWO_LEVELS,
    VALUE_FLAGS,
    Layout,
    complete_schedule,
)

SIZES = {
    "tensor": "tp", "pipeline": "pp", "chunks": "v", "data": "dp", "zero": "zero", "expert": "ep",
    "expert_tensor": "etp", "context": "cp",
}  # fmt: skip
WORDS: dict[str, tuple[str, Any]] = {
    "sp": ("sequence", True),
    **{word: ("schedule", word) for word in SCHEDULES},
    **{word: ("precision", word) for word in PRECISIONS},
    **{word: ("recompute", word) for word in RECOMPUTE},
    **{word: ("comm", (word,)) for word in COMMUNICATIONS[1:]},
}


def short_name(layout: Layout) -> str:
    """Return the short name that :func:`parse_layout` reads. Values without a token are omitted."""
    words = {value: word for word, value in WORDS.items()}
    tokens = [
        f"{SIZES[key]}{value}" if key in SIZES else words[key, value]
        for key, value in _stated(layout).items()
        if key in SIZES or (key, value) in words
    ]
    return "-".join(tokens) or "dp1"


def parse_layout(name: str) -> Layout:
    """Return the layout with a short name such as ``tp2-sp-pp2-dp2-zero1-bf16``, supported or not.
    ``dpN`` counts all data-parallel ranks: ``ep2`` alone is ``ep2-dp2``, where each expert has one
    replica, and ``ep2-dp4`` has two. With ``cpN``, N ranks split each sequence and communicate by
    p2p unless a token says otherwise; with a2a+p2p, pairs of ranks exchange heads. Raises
    ConfigError if a token is unknown or repeated, or if expert or context sizes do not fit."""
    values: dict[str, Any] = {}
    sizes = {token: key for key, token in SIZES.items()}
    for token in name.split("-"):
        size = re.fullmatch(f"({'|'.join(sizes)})([0-9]+)", token)
        if size:
            key, value = sizes[size[1]], int(size[2])
            fits = value <= 3 if key == "zero" else value >= 1
        else:
            key, value = WORDS.get(token, ("", None))
            fits = key != ""
        if not fits:
            raise ConfigError(
                f"layout {name}: unknown {token!r}; a layout consists of tpN, sp, ppN, vN "
                "(stages per process), dpN, epN, etpN, cpN, zero0 to zero3, "
                f"{', '.join(list(WORDS)[1:])}, joined by '-'"
            )
        if key in values:
            raise ConfigError(f"layout {name}: {token!r} sets the {key} a second time")
        values[key] = value
    values["schedule"], values["chunks"] = complete_schedule(
        values.get("schedule"), values.get("chunks")
    )
    layout = _with_experts(Layout(**values), name, "data" in values)
    if layout.comm and (layout.context == 1 or (TWO_LEVELS in layout.comm and layout.context % 4)):
        raise ConfigError(
            f"layout {name}: {layout.comm[0]!r} is how the ranks of cpN communicate, where N is 2 "
            f"or more, and a multiple of 4 with {TWO_LEVELS!r}, which has rings of pairs of ranks"
        )
    return replace(layout, exchanging=2 if TWO_LEVELS in layout.comm else 1)


def _with_experts(layout: Layout, name: str, complete: bool) -> Layout:
    """Return the layout with the data-parallel ranks that its experts need, unless ``complete``."""
    whole, tensor = layout.expert_tensor not in (None, layout.tensor), layout.tensor
    if not whole:
        layout = replace(layout, expert_tensor=None)
    elif layout.expert_tensor != 1 or (layout.expert > 1 and layout.expert % tensor):
        raise ConfigError(
            f"layout {name}: experts are cut over all {tensor} tensor-parallel ranks, without "
            f"etpN, or are whole, with etp1 and without epN or with a multiple of {tensor} as N"
        )
    axis = layout.expert_axis
    if not complete:
        layout = replace(layout, data=axis)
    if layout.data % axis:
        raise ConfigError(
            f"layout {name}: dp{layout.data} must be a multiple of the {axis} data-parallel ranks "
            "that experts are divided over"
        )
    return layout


def flags_for(layout: Layout) -> list[str]:
    """Return a layout's flags, omitting defaults. The number of processes is set by the launcher,
    offloading by the DeepSpeed JSON, and the number of micro batches by the batch sizes."""
    stated = _stated(layout)
    if layout.precision != "fp32":
        stated["zero"] = layout.zero  # its default depends on the precision
    words = []
    for name, flag in VALUE_FLAGS.items():
        if name in stated:
            words += [flag, str(stated[name])]
    if layout.comm:
        words += ["--cp-comm-type", *layout.comm]
    if TWO_LEVELS in layout.comm:
        levels = layout.exchanging, layout.context // layout.exchanging
        words += ["--hierarchical-context-parallel-sizes", *map(str, levels)]
    words += ["--sequence-parallel"] * layout.sequence
    words += [f"--{layout.precision}"] * (layout.precision != "fp32")
    words += [GRADS_IN_FP32] * layout.grads_in_fp32
    if layout.states is not None:
        words.append(STATES)
        for name, dtype in layout.states._asdict().items():
            words += [f"--{name.replace('_', '-')}-dtype", dtype] * (dtype != "fp32")
    if layout.recompute == "selective":
        words += ["--recompute-granularity", "selective"]
    if layout.mlp_act:
        words += ["--recompute-modules", *["core_attn"] * bool(layout.recompute), "mlp_act"]
    if layout.recompute in ("uniform", "block"):
        words += ["--recompute-granularity", "full", "--recompute-method", layout.recompute]
    return words


def _stated(layout: Layout) -> dict[str, Any]:
    """Return the values that must be given. The others are defaults or derived from these."""
    chunks = complete_schedule(layout.schedule, None)[1]
    # Several stages without a schedule's name would mean an interleaved schedule.
    usual = Layout(schedule="1f1b" if layout.chunks == 1 else "", chunks=chunks)
    names = [field.name for field in fields(layout)]
    return {n: getattr(layout, n) for n in names if getattr(layout, n) != getattr(usual, n)}
