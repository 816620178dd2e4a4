"""RoPE scaling in GGUF files. Linear scaling and YaRN are stored as metadata. Llama 3's scaling
(``rope_freqs``) and LongRoPE (``rope_factors_short``, ``rope_factors_long``) are stored as tensors
of factors that multiply the wavelengths of the channel pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.formats.gguf.container import Content, Keys

_FACTORS, _LONG, _SHORT = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
ROPE_TENSORS = (_FACTORS, _LONG, _SHORT)
_ORIGINAL = "original_max_position_embeddings"
_YARN = {"factor": "factor", _ORIGINAL: "original_context_length", "beta_fast": "yarn_beta_fast",
         "beta_slow": "yarn_beta_slow"}  # fmt: skip
_MOST_PAIRS = 2**12


def read_scaling(given: Keys) -> Content | None:
    """Return the ``rope_scaling`` that the keys describe, or None without scaling."""
    kind = given.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": given.require("rope.scaling.factor")}
    if kind != "yarn":
        given.refuse("rope.scaling.type", "expected none, linear or yarn")
    given.only("rope.scaling.attn_factor", 1.0)
    values = {ours: given.get(f"rope.scaling.{theirs}") for ours, theirs in _YARN.items()}
    return {"rope_type": kind} | {name: each for name, each in values.items() if each is not None}


def write_scaling(content: Content) -> Content:
    """Return the metadata for a ``rope_scaling``. Raises ValueError if GGUF cannot express it."""
    scaling = content.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "llama3"):
        return {}
    values = {"linear": {"factor": "factor"}, "yarn": _YARN}.get(kind)
    surplus = {*scaling} - {"rope_type", "type"} - {*(values or {})}
    if values is None or surplus:
        raise ValueError(f"--rope-scaling {scaling}: GGUF files have no such scaling")
    number = {_ORIGINAL: int}
    return {"rope.scaling.type": kind} | {
        f"rope.scaling.{theirs}": number.get(ours, float)(scaling[ours])
        for ours, theirs in values.items()
        if ours in scaling
    }


def _factors(scaling: Content, theta: float, width: int) -> Tensor:
    """Return the factors [D / 2] of Llama 3's scaling, in float32: 1 for short wavelengths,
    ``factor`` for long ones, and an interpolation of the frequencies in between
    (``_compute_llama3_parameters`` in transformers)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    factor, original = float(scaling["factor"]), float(scaling[_ORIGINAL])
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    turns = original / (2 * math.pi * theta**exponents)
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(
        turns > high, 1.0, torch.where(turns < low, torch.full_like(turns, factor), between)
    ).float()


def write_factors(content: Content) -> Mapping[str, Tensor]:
    """Return the tensors for Llama 3's scaling or LongRoPE, and none for other scalings."""
    scaling = content.get("rope_scaling") or {}
    if "long_factor" in scaling:
        return {
            _LONG: torch.tensor(scaling["long_factor"], dtype=torch.float32),
            _SHORT: torch.tensor(scaling["short_factor"], dtype=torch.float32),
        }
    if scaling.get("rope_type") != "llama3":
        return {}
    width = content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]
    return {_FACTORS: _factors(scaling, content["rope_theta"], width)}


def read_factors(given: Keys, content: Content) -> Content | None:
    """Return a Llama 3 ``rope_scaling`` that gives the factors in the file, or None without
    factors. The file lacks the parameters of the scaling, so known ones are tried, and the first
    that match are used. Raises CheckpointError if none match."""
    if _FACTORS not in given.tensors:
        return None
    stored, width = _vector(given, _FACTORS), content["head_dim"]
    lengths = [8192, *(2**n for n in range(4, 21))]
    largest = {float(str(stored.max().numpy())), 8.0, 32.0, 16.0, 4.0, 2.0}
    if stored.numel() * 2 == width:
        for factor, original in itertools.product(sorted(largest), lengths):
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                       "high_freq_factor": 4.0, _ORIGINAL: original}  # fmt: skip
            if torch.allclose(_factors(scaling, content["rope_theta"], width), stored, rtol=1e-5):
                return scaling
    given.refuse_tensor(_FACTORS, "its factors are not those of Llama 3's scaling of RoPE")


def read_longrope(given: Keys) -> Content | None:
    """Return the ``rope_scaling`` of LongRoPE, or None if its tensors are missing. The attention
    scale is derived from the context lengths."""
    given.get("rope.scaling.attn_factor")
    if _LONG not in given.tensors and _SHORT not in given.tensors:
        return None
    values = {}
    for name, tensor in (("short_factor", _SHORT), ("long_factor", _LONG)):
        if tensor not in given.tensors:
            given.refuse_tensor(tensor, "it is missing")
        values[name] = [float(str(each)) for each in _vector(given, tensor).numpy()]
    return {"type": "longrope", **values}


def write_longrope(content: Content) -> Content:
    """Return the key for LongRoPE's attention scale (from Phi-3's modeling code)."""
    scale = content["max_position_embeddings"] / content[_ORIGINAL]
    if "rope_scaling" not in content or scale <= 1:
        return {}
    return {
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(content[_ORIGINAL]))
    }


def _vector(given: Keys, name: str) -> Tensor:
    values = given.values(name).float()
    if values.dim() != 1 or not 0 < values.numel() <= _MOST_PAIRS:
        given.refuse_tensor(name, f"it has the shape {tuple(values.shape)}")
    return values
