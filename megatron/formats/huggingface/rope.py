"""Rotary positions in config.json: ``rope_theta`` and ``rope_scaling`` of transformers 4,
``rope_parameters`` of transformers 5."""

from __future__ import annotations

import json
from typing import Any

from megatron.config import ConfigError, ModelConfig
from megatron.config.positions import RopeScaling
from megatron.formats.huggingface.settings import HFConfigReader

_ORIGINAL = "original_max_position_embeddings"
_BY_LENGTH = ("llama3", "yarn", "longrope")
"""Types that know the length before the stretching."""


def read_rope(
    given: HFConfigReader,
    head_dim: int,
    positions: int,
    theta: float,
    theta_key: str = "rope_theta",
    share_key: str | None = None,
    share: float = 1.0,
    types: dict[str, str] | None = None,
) -> dict[str, Any]:
    """``rotary_base``, ``rotary_percent`` and ``rope_scaling`` of a config.json.

    Args:
        given: the keys.
        head_dim: width of a head.
        positions: the longest sequence.
        theta: base of the frequencies where the file does not say.
        theta_key: what transformers 4 calls the base.
        share_key: what transformers 4 calls the share of a head that is rotated; None where that is
            all of it.
        share: that share where the file does not say.
        types: other names that the architecture gives to types of stretching.

    Raises:
        CheckpointError: what the two versions read differs, or cannot be represented.
    """
    parameters = given.table("rope_parameters") or {}
    older = given.table("rope_scaling") or {}
    given.unused(_ORIGINAL)
    share_name = share_key or "partial_rotary_factor"
    # transformers 4 writes down its own name for them beside that of the architecture.
    base = _one(given, (theta_key, "rope_theta"), parameters.get("rope_theta"))
    rotated = _one(
        given, (share_name, "partial_rotary_factor"), parameters.get("partial_rotary_factor")
    )
    rotated = share if rotated is None else rotated
    if share_key is None and rotated != 1.0:
        given.refuse(share_name, rotated, "such models rotate whole heads")
    pairs = int(head_dim * rotated) // 2
    forms = [
        read_scaling(given, name, _without_base(form), pairs, positions, types)
        for name, form in (("rope_scaling", older), ("rope_parameters", parameters))
        if _without_base(form)
    ]
    if len(forms) == 2 and forms[0] != forms[1]:
        given.refuse(
            "rope_scaling", older, f"rope_parameters says otherwise: {json.dumps(parameters)}"
        )
    return {
        "position_embedding_type": "rope",
        "rotary_base": theta if base is None else base,
        "rotary_percent": rotated,
        "rope_scaling": forms[0] if forms else None,
    }


def read_scaling(
    given: HFConfigReader,
    name: str,
    form: dict[str, Any],
    pairs: int,
    positions: int,
    types: dict[str, str] | None = None,
) -> str | None:
    """One form of stretching as ``--rope-scaling`` takes it; None where nothing is stretched.

    Args:
        given: the keys, for the length before the stretching.
        name: of the key that holds the form.
        form: what is in it, without base and share.
        pairs: rotated channel pairs of a head.
        positions: the longest sequence.
        types: other names that the architecture gives to types of stretching.

    Raises:
        CheckpointError: it cannot be represented.
    """
    form = dict(form)
    kind = form.pop("rope_type", form.pop("type", "default"))
    form.pop("type", None)
    kind = (types or {}).get(kind, kind)
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


def write_rope(model: ModelConfig, theta_key: str = "rope_theta") -> dict[str, Any]:
    """The keys for a model, as transformers 4 and 5 read them."""
    newer = json.loads(model.positions.rope_scaling.to_json())
    scaling = {} if model.positions.rope_scaling.is_default else newer
    newer = newer | {"rope_theta": model.positions.rotary_base}
    keys: dict[str, Any] = {theta_key: model.positions.rotary_base}
    if scaling:
        keys["rope_scaling"] = scaling
    return keys | {"rope_parameters": newer}


def _without_base(form: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in form.items() if k not in ("rope_theta", "partial_rotary_factor")}


def _one(given: HFConfigReader, names: tuple[str, ...], newer: Any) -> float | None:
    """The number that both versions read; None where neither says."""
    older = given.optional_number(names, None)
    if newer is None:
        return older
    if isinstance(newer, bool) or not isinstance(newer, int | float):
        given.refuse("rope_parameters", newer, f"{names[-1]} must be a number")
    if older not in (None, newer):
        given.refuse(names, older, f"rope_parameters says {newer!r}; transformers 5 would read it")
    return float(newer)
