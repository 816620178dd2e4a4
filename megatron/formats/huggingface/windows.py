"""Sliding windows in config.json: ``layer_types`` says which block has one."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.settings import HFConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(model: ModelConfig) -> list[str]:
    """The kind of each block."""
    return [FULL if window is None else SLIDING for window in model.windows]


def read_windows(given: HFConfigReader, window: int | None, default: list[str]) -> dict[str, Any]:
    """``sliding_window`` and ``window_attn_skip_freq`` of a config.json.

    Args:
        given: the keys.
        window: tokens that a query sees in blocks with a window.
        default: the kind of each block where the file does not say.

    Raises:
        CheckpointError: the blocks without a window come at no regular distance.
    """
    kinds = given.names("layer_types") or default
    if len(kinds) != len(default) or not set(kinds) <= {FULL, SLIDING}:
        given.refuse(
            "layer_types",
            kinds,
            f"it must be {FULL} or {SLIDING} for each of {len(default)} blocks",
        )
    if SLIDING not in kinds:
        return {"sliding_window": None}
    if window is None:
        given.refuse("sliding_window", None, f"layer_types has {SLIDING}")
    every = kinds.index(FULL) + 1 if FULL in kinds else None
    regular = [
        FULL if every is not None and (n + 1) % every == 0 else SLIDING for n in range(len(kinds))
    ]
    if kinds != regular:
        given.refuse(
            "layer_types" if "layer_types" in given.content else "max_window_layers",
            given.content.get("layer_types", given.content.get("max_window_layers")),
            "here every so-manieth block sees all tokens (--window-attn-skip-freq), the others "
            "have the window",
        )
    return {"sliding_window": window, "window_attn_skip_freq": every}
