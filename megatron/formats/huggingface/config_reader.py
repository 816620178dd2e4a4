"""Reads config.json so that no key is overlooked: what is not understood is refused.

transformers 4 and 5 write RoPE and sliding windows differently: ``rope_theta`` and
``rope_scaling``, or ``rope_parameters``. ``layer_types`` lists the blocks with a window.
`transformers` validates RoPE scaling by warnings only, so :class:`RopeScaling` does it here.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.checkpoint.files import CheckpointError
from megatron.config import ConfigError, ModelConfig, ModelFlags
from megatron.config.flags import value_type
from megatron.config.patterns import but_every_last, shortest
from megatron.config.positions import RopeScaling
from megatron.formats.features import harmless_names

Names = str | tuple[str, ...]
"""A key, or several equivalent ones, of which the first is written."""
Keys = Mapping[Any, str]
"""Fields of :class:`ModelFlags` by :data:`Names`; ``activation`` stands for the flags of the MLP's
activation."""

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {"bias_gelu_fusion": False},
    "gelu_python": {"bias_gelu_fusion": False},
    "gelu_new": {},
    "gelu_fast": {},
    "gelu_accurate": {},
    "gelu_pytorch_tanh": {},
    "relu": {"relu": True},
    "relu2": {"squared_relu": True},
}
"""Our flags by the name of an activation without a gate."""

GATES: dict[str, dict[str, Any]] = {
    "silu": {"glu_activation": "swiglu"},
    "swish": {"glu_activation": "swiglu"},
    "gelu_pytorch_tanh": {"glu_activation": "geglu"},
    "gelu_new": {"glu_activation": "geglu"},
    "gelu_fast": {"glu_activation": "geglu"},
    "gelu": {"glu_activation": "geglu_erf"},
    "quick_gelu": {"glu_activation": "quick_geglu"},
    "relu2": {"glu_activation": "squared_reglu"},
}
"""Our flags by the name of a gate's activation."""

ACTIVATION_NAMES = {
    "gelu_tanh": "gelu_new",
    "gelu_erf": "gelu",
    "relu": "relu",
    "squared_relu": "relu2",
    "xielu": "xielu",
    "squared_reglu": "relu2",
    "swiglu": "silu",
    "geglu": "gelu_pytorch_tanh",
    "geglu_erf": "gelu",
    "quick_geglu": "quick_gelu",
}
"""The name that is written for each activation of :class:`MLPConfig`."""

_NULLABLE = (
    "num_query_groups", "kv_channels", "sliding_window", "attention_chunk_size",
    "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank",
)  # fmt: skip
"""Fields whose key can be null regardless of its default."""


class HFConfigReader:
    """The keys of a config.json. A key that the file lacks has the value of ``defaults`` or of the
    model's configuration class in `transformers`, which is imported only then."""

    def __init__(
        self, content: dict[str, Any], path: Path, title: str, model_type: str,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.content, self.path, self.title = content, path, title
        self._model_type, self._defaults = model_type, dict(defaults or {})
        self._understood: set[str] = set()

    def fields(self, keys: Keys, activations: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The values of keys that mean the same as a flag, by field of :class:`ModelFlags`. Raises
        CheckpointError if a value has the wrong type."""
        hints, values = typing.get_type_hints(ModelFlags), dict[str, Any]()
        for names, field in keys.items():
            if field == "activation":
                values |= self.choice(names, activations)
                continue
            kind, value = value_type(hints[field]), self._value(names)
            if value is None and (field in _NULLABLE or self.default(names) is None):
                values[field] = None
            else:
                read = {int: self.whole, float: self.number, bool: self.flag}[kind]
                values[field] = read(names)
        return values

    def whole(self, names: Names) -> int:
        """A positive integer."""
        value = self._value(names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(names, value, "expected a positive integer")
        return value

    def optional_whole(self, names: Names) -> int | None:
        """A positive integer, or null."""
        return None if self._value(names) is None else self.whole(names)

    def number(self, names: Names) -> float:
        """A number."""
        value = self._value(names)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(names, value, "expected a number")
        return float(value)

    def flag(self, names: Names) -> bool:
        """true or false."""
        value = self._value(names)
        if not isinstance(value, bool):
            self.refuse(names, value, "expected true or false")
        return value

    def choice(self, names: Names, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The flags that one of several names stands for."""
        value = self._value(names)
        if not isinstance(value, str) or value not in known:
            self.refuse(names, value, f"expected one of {', '.join(known)}")
        return known[value]

    def table(self, name: str) -> dict[str, Any]:
        """An object; empty where it is null or absent."""
        value = self._value(name) if name in self.content else None
        if value is not None and not isinstance(value, dict):
            self.refuse(name, value, "expected an object")
        return value or {}

    def names(self, name: str) -> list[str] | None:
        """A list of strings; None where it is null or absent."""
        value = self._value(name) if name in self.content else None
        if value is not None and not (
            isinstance(value, list) and all(isinstance(word, str) for word in value)
        ):
            self.refuse(name, value, "expected a list of names")
        return value

    def only(self, name: str, allowed: Collection[Any], why: str) -> None:
        """Refuses other values than these; an absent key is fine."""
        if name in self.content and self._value(name) not in allowed:
            self.refuse(name, self.content[name], why)

    def unused(self, *names: str) -> None:
        """Accept keys that do not affect the computation of such a model."""
        self._understood.update(names)

    def refuse(self, names: Names, value: Any, why: str) -> NoReturn:
        """Raise a CheckpointError that names the wrong value and its file."""
        name = names if isinstance(names, str) else names[0]
        text = f"{value!r}"
        text = text if len(text) < 200 else text[:197] + "..."
        raise CheckpointError(f"{self.path}: {name} is {text} ({self.title}): {why}")

    def refuse_the_rest(self) -> None:
        """Refuses keys that nothing has read, unless they say nothing. Raises CheckpointError
        naming them."""
        unknown = [
            f"{name} = {value!r}"
            for name, value in self.content.items()
            if name not in self._understood.union(harmless_names("keys of config.json"))
            and value is not None
            and value is not False
            and value not in ([], {}, "")
        ]
        if unknown:
            raise CheckpointError(
                f"{self.path}: the effect of {', '.join(unknown)} on a model ({self.title}) is not "
                "known; remove keys that do not change what it computes"
            )

    def default(self, names: Names) -> Any:
        """The value of a key that the file lacks. Raises CheckpointError if the installed
        `transformers` does not know such models."""
        for name in _tuple(names):
            if name in self._defaults:
                return self._defaults[name]
        import transformers  # takes seconds
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        name, model_type = _tuple(names)[0], self._model_type
        if model_type not in CONFIG_MAPPING:
            raise CheckpointError(
                f"{self.path} has no {name}, and transformers {transformers.__version__} has no "
                f"default for it ({model_type}); install a newer version, or add the key"
            )
        # The signature has the defaults before others are derived from them.
        known = CONFIG_MAPPING[model_type]
        parameters = inspect.signature(known).parameters
        return parameters[name].default if name in parameters else getattr(known(), name, None)

    def _value(self, names: Names) -> Any:
        self._understood.update(_tuple(names))
        present = [name for name in _tuple(names) if name in self.content]
        if not present:
            return self.default(names)
        value = self.content[present[0]]
        for other in present[1:]:
            if self.content[other] != value:
                raise CheckpointError(
                    f"{self.path}: {present[0]} is {value!r}, but {other} is "
                    f"{self.content[other]!r}; they mean the same"
                )
        return value


def _tuple(names: Names) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

_ORIGINAL = "original_max_position_embeddings"


def read_rope(
    given: HFConfigReader,
    fields: dict[str, Any],
    theta_key: str = "rope_theta",
    share_key: str | None = None,
    share: float = 1.0,
    types: dict[str, str] | None = None,
    base: float = 10000.0,
) -> dict[str, Any]:
    """``rotary_base``, ``rotary_percent`` and ``rope_scaling`` of a config.json. Raises
    CheckpointError if the keys of the two versions differ, or cannot be represented.

    Args:
        fields: what was read already, ``kv_channels`` and ``max_position_embeddings`` included.
        share_key: transformers 4's key for the rotated share of a head; None for whole heads.
        types: the architecture's names of types of scaling, and the usual ones.
        base: the rotary base of a file that does not say it.
    """
    newer = given.table("rope_parameters")
    share_name = share_key or "partial_rotary_factor"
    # transformers 4 also writes its own names next to the architecture's.
    base = agreed(given, (theta_key, "rope_theta"), newer.get("rope_theta"), base)
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
    """The value of ``--rope-scaling``, None without scaling, from the part ``newer`` of
    ``rope_parameters`` and the rotated share of a head; see :func:`read_rope`."""
    given.unused(_ORIGINAL)
    pairs = int(fields["kv_channels"] * rotated) // 2
    older, tables = given.table("rope_scaling"), []
    for name, table in (("rope_scaling", older), ("rope_parameters", newer)):
        form = {k: v for k, v in table.items() if k not in ("rope_theta", "partial_rotary_factor")}
        if form:
            positions = fields["max_position_embeddings"]
            tables.append(_scaling(given, name, form, pairs, positions, types or {}))
    if len(tables) == 2 and tables[0] != tables[1]:
        text = json.dumps(given.content["rope_parameters"])
        given.refuse("rope_scaling", older, f"rope_parameters differs: {text}")
    return tables[0] if tables else None


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
    if not form.get("mscale_all_dim", True):  # DeepSeek's code reads 0 as none
        del form["mscale_all_dim"]
    if kind == "default":
        return None
    if kind in ("llama3", "yarn", "longrope"):  # with the length before scaling
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
    """A number with the keys ``names`` in transformers 4, and the value ``newer`` in
    ``rope_parameters``. Raises CheckpointError if it is not a number, or the two differ."""
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


def write_rope(
    model: ModelConfig, theta_key: str = "rope_theta", share_key: str | None = None
) -> dict[str, Any]:
    """The keys for a model, as transformers 4 and 5 read them; ``share_key`` as in
    :func:`read_rope`."""
    positions, newer = model.positions, json.loads(model.positions.rope_scaling.to_json())
    scaling = {} if positions.rope_scaling.is_default else {"rope_scaling": dict(newer)}
    newer["rope_theta"] = base = positions.rotary_base
    if share_key is None:
        return {theta_key: base} | scaling | {"rope_parameters": newer}
    newer["partial_rotary_factor"] = share = positions.rotary_percent
    return {theta_key: base, share_key: share} | scaling | {"rope_parameters": newer}


def short(value: float) -> float:
    """The nearest number of 15 decimal digits, so that one that is multiplied and divided again, or
    inverted twice, is as it was."""
    return float(f"{value:.15g}")


def layer_types(model: ModelConfig) -> list[str]:
    """The kind of each block."""
    return [FULL if window is None else SLIDING for window in model.windows]


def read_windows(given: HFConfigReader, window: int | None, default: list[str]) -> dict[str, Any]:
    """``sliding_window`` and ``window_attn_skip_freq`` of a config.json; ``default`` is the kind of
    each block without ``layer_types``."""
    kinds = given.names("layer_types") or default
    if len(kinds) != len(default) or not set(kinds) <= {FULL, SLIDING}:
        given.refuse(
            "layer_types", kinds, f"expected {FULL} or {SLIDING} for each of {len(default)} blocks"
        )
    if SLIDING not in kinds:
        return {"sliding_window": None}
    if window is None:
        given.refuse("sliding_window", None, f"layer_types has {SLIDING}")
    chosen = tuple(kind == SLIDING for kind in kinds)
    every = shortest(chosen, but_every_last) if FULL in kinds else None
    return {"sliding_window": window, "window_attn_skip_freq": every}


BIASES = ("attention", "mlp")
"""All linear layers, by a key for attention and one for the MLP."""


def read_biases(given: HFConfigReader, parts: tuple[str, ...] = BIASES) -> dict[str, Any]:
    """Return the flags for ``attention_bias`` and ``mlp_bias``: ``parts`` are linear layers that
    may have biases, of which the first key is for all of ``attention`` or its ``qkv`` alone, and
    the second for the ``mlp``. Raises CheckpointError for biases of other layers."""
    part = parts[0] if parts and parts[0] != "mlp" else None
    flags = {}
    if part is None:
        given.only("attention_bias", (False, None), "attention of such models has no biases")
    else:
        flags[f"add_{part}_bias"] = given.flag("attention_bias")
    if "mlp" not in parts:
        given.only("mlp_bias", (False, None), "the MLP of such models has no biases")
        return flags
    flags["add_mlp_bias"] = given.flag("mlp_bias")
    if parts == BIASES:
        whole = flags["add_attention_bias"] and flags["add_mlp_bias"]
        flags = {name: value and not whole for name, value in flags.items()}
        flags["add_bias_linear"] = whole
    return flags


def write_biases(model: ModelConfig, parts: tuple[str, ...] = BIASES) -> dict[str, Any]:
    """The inverse of :func:`read_biases`."""
    keys = {}
    if parts and parts[0] != "mlp":
        attention = model.attention
        keys["attention_bias"] = attention.proj_bias or (parts[0] == "qkv" and attention.qkv_bias)
    if "mlp" in parts:
        keys["mlp_bias"] = model.mlp.bias
    return keys
