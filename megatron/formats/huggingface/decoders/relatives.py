"""Relatives of Llama: an architecture described by its differences. :func:`relative` reads and
writes the common part: sizes, RoPE of each kind, biases by ``attention_bias`` and ``mlp_bias``,
windows by ``layer_types``. A table then adds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.config.patterns import every_last, shortest
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import (
    BIASES,
    FULL,
    SLIDING,
    HFConfigReader,
    Keys,
    layer_types,
    read_biases,
    read_rope,
    read_windows,
    write_biases,
    write_rope,
)
from megatron.formats.huggingface.entries import Entry, attention_biased, linear, qkv_biased
from megatron.formats.huggingface.llama import ACTIVATION, FIXED, HEAD_DIM, KEYS, llama_entries

Fields = dict[str, Any]
Kinds = Callable[[int], list[str]]
"""Return the kind of each block for a config.json without ``layer_types``."""

SIZES = KEYS | HEAD_DIM | ACTIVATION
"""Keys of most relatives."""
LAYER_NORM_SIZES = {
    key if key != "rms_norm_eps" else "layer_norm_eps": field for key, field in SIZES.items()
}
"""The same of relatives with LayerNorm."""

UNGATED_MLP = (*linear("mlp.up", "mlp.up_proj"), *linear("mlp.down", "mlp.down_proj"))
"""An MLP without a gate."""


def relative_entries(*further: Iterable[Entry], **others: Any) -> tuple[Entry, ...]:
    """The table of Llama, with the biases that a model has; arguments as in
    :func:`~megatron.formats.huggingface.llama.llama_entries`."""
    biases = {"qkv_bias": qkv_biased, "proj_bias": attention_biased}
    return llama_entries(*(tuple(part) for part in further), **biases | others)


def relative(
    title: str,
    model_type: str,
    model_class: str,
    entries: tuple[Entry, ...] | None = None,
    *,
    keys: Keys = SIZES,
    fixed: Mapping[str, Any] | None = None,
    features: Iterable[str] = (),
    biases: tuple[str, ...] = (),
    base: float = 10_000.0,
    share: float | None = None,
    all_biases: bool = False,
    windows: Kinds | None = None,
    reads_windows: bool = True,
    rope: bool = True,
    gated: bool = True,
    read: Callable[[HFConfigReader, Fields], Fields] = lambda given, fields: {},
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {},
    **others: Any,
) -> Architecture:
    """Return the table of a relative of Llama; further arguments as in :class:`Architecture`.

    Args:
        entries: by default Llama's.
        fixed: fields besides rotary positions, RMSNorm, and linear layers without biases.
        biases: as in :func:`~megatron.formats.huggingface.config_reader.read_biases`.
        base: the rotary base of a file that does not say it.
        share: the rotated share of a head of a file that does not say it; None for whole heads.
        all_biases: whether all linear layers may have biases, which ``keys`` or ``read`` say.
        windows: the kinds of blocks of a file that does not say them; None without windows.
        reads_windows, rope: False where ``read`` has the windows, or ``read`` and ``write`` RoPE.
        read: fields besides those above, which may replace them.
        write: keys likewise.
    """
    named = {f"add_{part}_bias" for part in biases} | {"rope_scaling"}
    named |= {"rotary_percent"} if share is not None else set()
    named |= {"sliding_window", "window_attn_skip_freq"} if windows else set()
    plain = {} if all_biases or biases == BIASES else {"add_bias_linear": False}

    share_key = None if share is None else "partial_rotary_factor"

    def read_all(given: HFConfigReader, fields: Fields) -> Fields:
        flags = dict(plain) | read_biases(given, biases)
        given.unused("pretraining_tp")
        if rope:
            flags |= read_rope(given, fields, share_key=share_key, share=share or 1.0, base=base)
        if windows and reads_windows:
            kinds = windows(fields["num_layers"])
            flags |= read_windows(given, given.optional_whole("sliding_window"), kinds)
        return flags | read(given, fields | flags)

    def write_all(model: ModelConfig) -> dict[str, Any]:
        # The default can be a token that a small vocabulary does not have.
        values: dict[str, Any] = {"pad_token_id": None, **write_biases(model, biases)}
        if rope:
            values |= write_rope(model, share_key=share_key)
        if windows:
            # Their code requires one even where no block has a window.
            longest = model.positions.max_position_embeddings
            values["sliding_window"] = model.attention.sliding_window or longest
            values["layer_types"] = layer_types(model)
        return values | write(model)

    return Architecture(
        title=title,
        model_type=model_type,
        model_class=model_class,
        entries=relative_entries() if entries is None else entries,
        keys=keys,
        fixed=FIXED | plain | dict(fixed or {}),
        features=frozenset(named.union(features)),
        gated=gated,
        read=read_all,
        write=write_all,
        **others,
    )


def all_but_every(n: int) -> Kinds:
    """Windows in all blocks but every N-th."""
    return lambda layers: [SLIDING if (k + 1) % n else FULL for k in range(layers)]


def without_rope(skipped: Iterable[bool]) -> Fields:
    """Return ``no_rope_freq`` for blocks some of which do not rotate queries and keys."""
    chosen = tuple(skipped)
    return {"no_rope_freq": shortest(chosen, every_last) if any(chosen) else None}


def rotating(model: ModelConfig) -> list[bool]:
    """For each block, True if it rotates queries and keys."""
    return [model.positions.rotates(n) for n in range(model.num_layers)]


def rotates_in_windows(model: ModelConfig) -> bool:
    """True if exactly the blocks with a window rotate queries and keys."""
    return rotating(model) == [window is not None for window in model.windows]


ROTATES_IN_WINDOWS = Requirement(
    rotates_in_windows, "--no-rope-freq with the blocks that have no --sliding-window"
)


def scaled_by_default(given: HFConfigReader, fields: Fields, factor: float, base: float) -> Fields:
    """RoPE, which is scaled as in Llama 3.1 where a file does not say it."""
    if not any(given.content.get(name) for name in ("rope_parameters", "rope_scaling")):
        given.content = given.content | {"rope_scaling": {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }}  # fmt: skip
    return read_rope(given, fields, base=base)
