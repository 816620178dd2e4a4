"""``params.json`` of a Llama, as the keys of Hugging Face's config.json.

Meta's file leaves some values to the program that reads it. They are taken as Meta's program and
transformers' conversion of the files do, and a note says what was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError

_KNOWN = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size",
    "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope",
    "sliding_window", "max_seq_len",
}  # fmt: skip
_HARMLESS = {"max_batch_size", "model_parallel_size", "use_biases"}
"""Sizes of Meta's buffers, and what is refused unless it is false."""
_CONTEXTS = {10_000.0: 4096, 500_000.0: 8192}
"""Longest sequence of Llama 2 and 3, by the base of their rotary frequencies."""
_LONG_CONTEXT = 16_384
"""That of Code Llama and others with a further base."""
_SCALED_CONTEXT = 131_072
"""That of Llama 3.1 and later, whose frequencies are scaled."""
_MISTRAL_CONTEXT = 32_768


@dataclass(frozen=True)
class MetaParams:
    """The content of a params.json.

    Attributes:
        keys: keys of config.json, but for what the tensors show: vocabulary and tied head.
        scaled: whether the rotary frequencies are scaled as in Llama 3.1.
        notes: what the file does not say and was taken as usual.
    """

    keys: dict[str, Any]
    scaled: bool
    notes: tuple[str, ...]

    def config(self, vocabulary: int, tied: bool) -> dict[str, Any]:
        """The config.json of a model with that many tokens; ``tied`` says whether its head is the
        token embedding."""
        keys = {**self.keys, "vocab_size": vocabulary, "tie_word_embeddings": tied}
        if self.scaled:
            # Llama 3.2's small models are the only published ones with a tied head.
            keys["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": 32.0 if tied else 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        return keys


def read_params(content: Any, path: Path) -> MetaParams:
    """The parsed params.json at ``path``. Raises CheckpointError if a value is missing, malformed
    or of a model that cannot be represented."""
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = {**content, **content["model"], "model": None}
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    unknown = [
        f"{name} = {value!r}"
        for name, value in content.items()
        if name not in _KNOWN | _HARMLESS or (name == "use_biases" and value)
        if value not in (None, False, {}, [], -1)
    ]
    if unknown:
        raise CheckpointError(
            f"{path}: {', '.join(unknown)}: such a Llama cannot be represented (experts, images "
            "and quantised weights cannot)"
        )
    given = _Params(content, path)
    hidden, heads = given.whole("dim"), given.whole("n_heads")
    window = content.get("sliding_window")
    # Mistral's files name the width of the MLP itself.
    mistral = window is not None or content.get("hidden_dim") is not None
    theta = given.number("rope_theta", 10_000.0)
    scaled = content.get("use_scaled_rope", False)
    if not isinstance(scaled, bool):
        raise CheckpointError(f"{path}: use_scaled_rope is {scaled!r}, expected true or false")
    keys: dict[str, Any] = {
        "model_type": "mistral" if mistral else "llama",
        "hidden_size": hidden,
        "intermediate_size": _ffn_size(given, hidden),
        "num_hidden_layers": given.whole("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": given.whole("n_kv_heads", heads),
        "head_dim": given.whole("head_dim", hidden // heads),
        "rms_norm_eps": given.number("norm_eps"),
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    }
    if mistral:
        keys["sliding_window"] = None if window is None else given.whole("sliding_window")
    else:
        keys |= {"attention_bias": False, "mlp_bias": False}
    longest, notes = content.get("max_seq_len"), []
    if longest is None:
        longest = _longest(theta, scaled, mistral)
        notes.append(
            f"{path.name} does not say the longest sequence; it is taken as {longest:,} tokens"
        )
    keys["max_position_embeddings"] = longest
    return MetaParams(keys, scaled, tuple(notes))


def _longest(theta: float, scaled: bool, mistral: bool) -> int:
    if mistral:
        return _MISTRAL_CONTEXT
    return _SCALED_CONTEXT if scaled else _CONTEXTS.get(theta, _LONG_CONTEXT)


def _ffn_size(given: _Params, hidden: int) -> int:
    """Width of the MLP, as Meta's FeedForward computes it: two thirds of 4 H, times a factor,
    rounded up to a multiple."""
    if given.content.get("hidden_dim") is not None:
        return given.whole("hidden_dim")
    wanted = int(given.number("ffn_dim_multiplier", 1.0) * int(8 * hidden / 3))
    multiple = given.whole("multiple_of", 256)
    return -(-wanted // multiple) * multiple


@dataclass(frozen=True)
class _Params:
    content: dict[str, Any]
    path: Path

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected a positive number")
        return float(value)

    def _value(self, name: str, default: float | None) -> Any:
        value = self.content.get(name)
        if value is None and default is None:
            raise CheckpointError(f"{self.path} has no {name}")
        return default if value is None else value
