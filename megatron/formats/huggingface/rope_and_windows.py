"""RoPE and sliding windows in config.json, which transformers 4 and 5 write differently:
``rope_theta`` and ``rope_scaling``, or ``rope_parameters``. ``layer_types`` lists the blocks with a
window.

`transformers` validates RoPE scaling by warnings only, so :class:`RopeScaling` does it here.
"""

from __future__ import annotations

import json
from typing import Any

from megatron.config import ConfigError, ModelConfig
from megatron.config.positions import RopeScaling
from megatron.formats.huggingface.config_reader import HFConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"

_ORIGINAL = "original_max_position_embeddings"
_BY_LENGTH = ("llama3", "yarn", "longrope")
"""Types that have the length before scaling as a parameter."""


def read_rope(
    given: HFConfigReader,
    fields: dict[str, Any],
    theta_key: str = "rope_theta",
    share_key: str | None = None,
    share: float = 1.0,
    types: dict[str, str] | None = None,
) -> dict[str, Any]:
    """``rotary_base``, ``rotary_percent`` and ``rope_scaling`` of a config.json. Raises
    CheckpointError if the keys of the two versions differ, or cannot be represented.

    Args:
        fields: what was read already; ``kv_channels`` and ``max_position_embeddings`` are used.
        share_key: the key of the rotated share of a head in transformers 4; None where whole heads
            are rotated.
        types: names that the architecture has for other types of scaling.
    """
    newer = given.table("rope_parameters")
    share_name = share_key or "partial_rotary_factor"
    # transformers 4 also writes its own names beside those of the architecture.
    base = agreed(given, (theta_key, "rope_theta"), newer.get("rope_theta"), 10000.0)
    rotated = agreed(
        given, (share_name, "partial_rotary_factor"), newer.get("partial_rotary_factor"), share
    )
    if share_key is None and rotated != 1.0:
        given.refuse(share_name, rotated, "such models rotate whole heads")
    return {
        "rotary_base": base,
        "rotary_percent": rotated,
        "rope_scaling": read_scaling(given, fields, newer, rotated, types),
    }


def read_scaling(
    given: HFConfigReader,
    fields: dict[str, Any],
    newer: dict[str, Any],
    rotated: float = 1.0,
    types: dict[str, str] | None = None,
) -> str | None:
    """The value of ``--rope-scaling``, None without scaling; as :func:`read_rope`, from the part of
    ``rope_parameters`` in ``newer`` and the share of a head that is rotated."""
    given.unused(_ORIGINAL)
    pairs = int(fields["kv_channels"] * rotated) // 2
    older, found = given.table("rope_scaling"), []
    for name, table in (("rope_scaling", older), ("rope_parameters", newer)):
        form = {k: v for k, v in table.items() if k not in ("rope_theta", "partial_rotary_factor")}
        if form:
            positions = fields["max_position_embeddings"]
            found.append(_scaling(given, name, form, pairs, positions, types or {}))
    if len(found) == 2 and found[0] != found[1]:
        text = json.dumps(given.content["rope_parameters"])
        given.refuse("rope_scaling", older, f"rope_parameters differs: {text}")
    return found[0] if found else None


def _scaling(
    given: HFConfigReader,
    name: str,
    form: dict[str, Any],
    pairs: int,
    positions: int,
    types: dict[str, str],
) -> str | None:
    kind = form.pop("rope_type", form.pop("type", "default"))
    form.pop("type", None)
    form.pop("finetuned", None)  # of the code of YaRN's authors
    kind = types.get(kind, kind)
    if kind == "default":
        return None
    if kind in _BY_LENGTH:
        outer = given.content.get(_ORIGINAL)
        if outer is not None:
            form[_ORIGINAL] = outer
        form.setdefault(_ORIGINAL, positions)
    if kind == "yarn" and form.get("factor") is None:
        form["factor"] = positions / form[_ORIGINAL]
    try:
        return RopeScaling.parse(json.dumps({"rope_type": kind} | form), pairs).to_json()
    except ConfigError as error:
        given.refuse(name, given.content.get(name), str(error))


def agreed(given: HFConfigReader, names: tuple[str, ...], newer: Any, default: float) -> float:
    """A number that both versions have a key for: ``names`` are those of transformers 4, ``newer``
    the value in ``rope_parameters``. Raises CheckpointError if it is not a number, or the two
    differ."""
    present = [name for name in names if given.content.get(name) is not None]
    older = given.number(tuple(present)) if present else None
    given.unused(*names)
    if newer is None:
        return default if older is None else older
    if isinstance(newer, bool) or not isinstance(newer, int | float):
        given.refuse("rope_parameters", newer, f"{names[-1]} must be a number")
    if older not in (None, newer):
        given.refuse(names, older, f"rope_parameters says {newer!r}, which transformers 5 reads")
    return float(newer)


def write_rope(model: ModelConfig, theta_key: str = "rope_theta") -> dict[str, Any]:
    """The keys for a model, as transformers 4 and 5 read them."""
    newer = json.loads(model.positions.rope_scaling.to_json())
    scaling = {} if model.positions.rope_scaling.is_default else {"rope_scaling": newer}
    base = model.positions.rotary_base
    return {theta_key: base} | scaling | {"rope_parameters": newer | {"rope_theta": base}}


def layer_types(model: ModelConfig) -> list[str]:
    """The kind of each block."""
    return [FULL if window is None else SLIDING for window in model.windows]


def read_windows(given: HFConfigReader, window: int | None, default: list[str]) -> dict[str, Any]:
    """``sliding_window`` and ``window_attn_skip_freq`` of a config.json; ``default`` is the kind of
    each block where the file does not say. Raises CheckpointError if the blocks without a window
    are not every N-th."""
    kinds = given.names("layer_types") or default
    if len(kinds) != len(default) or not set(kinds) <= {FULL, SLIDING}:
        given.refuse(
            "layer_types", kinds, f"expected {FULL} or {SLIDING} for each of {len(default)} blocks"
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
        name = "layer_types" if "layer_types" in given.content else "max_window_layers"
        given.refuse(
            name,
            given.content.get(name),
            "only every N-th block can see all tokens (--window-attn-skip-freq N); the others have "
            "the window",
        )
    return {"sliding_window": window, "window_attn_skip_freq": every}
