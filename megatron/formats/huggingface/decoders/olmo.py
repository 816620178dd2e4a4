"""OLMo 1, 2 and 3, and EXAONE 4. EXAONE 4 has OLMo 2's blocks, with norms after attention and MLP
instead of before them."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.config_reader import (
    FULL,
    SLIDING,
    HFConfigReader,
    agreed,
    read_scaling,
    read_windows,
    write_rope,
)
from megatron.formats.huggingface.decoders.relatives import (
    SIZES,
    all_but_every,
    relative,
    relative_entries,
    rotates_in_windows,
    rotating,
    without_rope,
)
from megatron.formats.huggingface.entries import norm
from megatron.formats.huggingface.llama import (
    LOCAL_UNSCALED,
    QK_NORMS,
    by_kind,
    local_base,
    read_kinds,
)

_OLMO_NORM = {"normalization": "PlainLayerNorm", "norm_epsilon": 1e-5}
OLMO = relative(
    "OLMo",
    "olmo",
    "OlmoForCausalLM",
    keys={key: field for key, field in SIZES.items() if key != "rms_norm_eps"}
    | {"clip_qkv": "clip_qkv"},
    fixed=_OLMO_NORM,
    biases=("attention",),
)
"""OLMo: Llama with LayerNorm without parameters. config.json has no key for its epsilon."""

POST_NORMS = (
    *norm("attention_post_norm", "post_attention_layernorm"),
    *norm("mlp_post_norm", "post_feedforward_layernorm"),
)
POST_NORM = {"pre_norm": False, "post_norm": True, "qk_layernorm": True}
_ENTRIES = relative_entries(QK_NORMS, POST_NORMS, mlp_norm=None)

OLMO2 = relative(
    "OLMo 2",
    "olmo2",
    "Olmo2ForCausalLM",
    _ENTRIES,
    fixed=POST_NORM | {"qk_layernorm_whole": True},
    biases=("attention",),
)
"""OLMo 2: one norm over the queries of all heads, and one over the keys of all heads."""


def _read_olmo3(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    nested = given.content.get("rope_parameters")
    if isinstance(nested, dict) and nested and not set(nested) & {FULL, SLIDING}:
        given.refuse("rope_parameters", nested, f"expected {FULL} and {SLIDING}")
    wide, narrow = read_kinds(given)
    base = agreed(given, ("rope_theta",), wide.get("rope_theta"), 500_000.0)
    local = narrow.get("rope_theta", 500_000.0 if nested else base)
    if not isinstance(local, int | float):
        given.refuse("rope_parameters", nested, "rope_theta must be a number")
    scaling = read_scaling(given, fields, wide)
    own = fields["sliding_window"] is not None and (local != base or scaling is not None)
    return {
        "rotary_base": base,
        "rotary_base_local": float(local) if own else None,
        "rope_scaling": scaling,
    }


def _write_olmo3(model: ModelConfig) -> dict[str, Any]:
    keys = write_rope(model)
    return keys | {"rope_parameters": by_kind(keys["rope_parameters"], local_base(model))}


OLMO3 = relative(
    "OLMo 3",
    "olmo3",
    "Olmo3ForCausalLM",
    _ENTRIES,
    fixed=POST_NORM | {"qk_layernorm_whole": True},
    biases=("attention",),
    features=("rotary_base_local",),
    windows=all_but_every(4),
    rope=False,
    read=_read_olmo3,
    write=_write_olmo3,
    requirements=(LOCAL_UNSCALED,),
)
"""OLMo 3: OLMo 2 with a sliding window in most blocks. RoPE is not scaled in those blocks."""


def _plain(model: ModelConfig) -> bool:
    """Return whether no block has a window and all blocks rotate queries and keys."""
    return all(rotating(model)) and not any(model.windows)


def _read_exaone(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    window, layers = given.optional_whole("sliding_window"), fields["num_layers"]
    kinds = [FULL] * layers
    if given.content.get("layer_types") is None and window is not None:
        every = given.whole("sliding_window_pattern")
        kinds = all_but_every(every)(layers)
    given.unused("sliding_window_pattern")
    flags = read_windows(given, window, kinds)
    if window is None:
        return flags
    kinds = given.names("layer_types") or kinds
    return flags | without_rope(kind == FULL for kind in kinds)


EXAONE4 = relative(
    "EXAONE 4",
    "exaone4",
    "Exaone4ForCausalLM",
    _ENTRIES,
    fixed=POST_NORM,
    features=("no_rope_freq",),
    windows=lambda layers: [FULL] * layers,
    reads_windows=False,
    read=_read_exaone,
    # With sliding_window set, transformers would not rotate heads in blocks without a window.
    write=lambda model: {"sliding_window": None} if _plain(model) else {},
    requirements=(
        Requirement(
            lambda model: rotates_in_windows(model) or _plain(model),
            "--no-rope-freq with the blocks that have no --sliding-window, or neither of them",
        ),
    ),
)
"""EXAONE 4: query and key norms per head. If any block has a window, only windowed blocks have
RoPE."""
