"""Architectures that are described by their differences from Llama. :func:`relative` reads and
writes what they share: sizes, all types of RoPE, biases from ``attention_bias`` and ``mlp_bias``,
and windows from ``layer_types``. An architecture's table adds its differences.
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
"""Function that returns the attention types of a number of blocks, if ``layer_types`` is
missing."""

SIZES = KEYS | HEAD_DIM | ACTIVATION
"""Keys that most of Llama's relatives have."""
LAYER_NORM_SIZES = {
    key if key != "rms_norm_eps" else "layer_norm_eps": field for key, field in SIZES.items()
}
"""Keys of relatives with LayerNorm instead of RMSNorm."""

UNGATED_MLP = (*linear("mlp.up", "mlp.up_proj"), *linear("mlp.down", "mlp.down_proj"))
"""Entries for an ungated MLP."""


def relative_entries(*further: Iterable[Entry], **others: Any) -> tuple[Entry, ...]:
    """Return Llama's entries, including optional biases. The arguments are those of
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
    """Return the table for a relative of Llama. Other arguments are fields of
    :class:`Architecture`.

    Args:
        entries: Llama's by default.
        fixed: fields in addition to RoPE, RMSNorm, and linear layers without biases.
        biases: see :func:`~megatron.formats.huggingface.config_reader.read_biases`.
        base: rotary base if the file has none.
        share: rotated fraction of a head if the file has none; None if heads are rotated whole.
        all_biases: whether all linear layers may have biases, as read by ``keys`` or ``read``.
        windows: attention types if the file does not list them; None if no block has a window.
        reads_windows, rope: False if ``read`` handles windows, or ``read`` and ``write`` RoPE.
        read: returns further fields, which may override those above.
        write: returns further keys, which may override those above.
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
        # The configuration class's default pad token may be outside a small vocabulary.
        values: dict[str, Any] = {"pad_token_id": None, **write_biases(model, biases)}
        if rope:
            values |= write_rope(model, share_key=share_key)
        if windows:
            # transformers requires sliding_window even if no block has a window.
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
    """Return a function for attention types in which every N-th block has no window."""
    return lambda layers: [SLIDING if (k + 1) % n else FULL for k in range(layers)]


def without_rope(skipped: Iterable[bool]) -> Fields:
    """Return the field ``no_rope_freq`` for a flag per block, True if the block has no RoPE."""
    chosen = tuple(skipped)
    return {"no_rope_freq": shortest(chosen, every_last) if any(chosen) else None}


def rotating(model: ModelConfig) -> list[bool]:
    """Return, for each block, whether it has RoPE."""
    return [model.positions.rotates(n) for n in range(model.num_layers)]


def rotates_in_windows(model: ModelConfig) -> bool:
    """Return whether exactly the windowed blocks have RoPE."""
    return rotating(model) == [window is not None for window in model.windows]


ROTATES_IN_WINDOWS = Requirement(
    rotates_in_windows, "--no-rope-freq with the blocks that have no --sliding-window"
)


def scaled_by_default(given: HFConfigReader, fields: Fields, factor: float, base: float) -> Fields:
    """Read RoPE. If the file has no scaling, use Llama 3.1's scaling with ``factor``."""
    if not any(given.content.get(name) for name in ("rope_parameters", "rope_scaling")):
        given.content = given.content | {"rope_scaling": {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }}  # fmt: skip
    return read_rope(given, fields, base=base)
