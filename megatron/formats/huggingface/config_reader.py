"""Reader of config.json in which a key that it does not understand is an error.

transformers 4 and 5 write RoPE and sliding windows differently. Version 4 has ``rope_theta`` and
``rope_scaling``, version 5 has ``rope_parameters``; ``layer_types`` lists the blocks with a window.
`transformers` only warns about invalid RoPE scaling, so :class:`RopeScaling` validates it here.
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
"""A key, or several keys with the same meaning. The first is the one to write."""
Keys = Mapping[Any, str]
"""Fields of :class:`ModelFlags`, by the :data:`Names` of their keys. ``activation`` stands for all
flags that determine the MLP's activation."""

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
"""Our flags for each activation of an ungated MLP, by its name in `transformers`."""

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
"""Our flags for each activation of a gated MLP, by its name in `transformers`."""

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
"""Name in `transformers` to write for each activation of :class:`MLPConfig`."""

_NULLABLE = (
    "num_query_groups", "kv_channels", "sliding_window", "attention_chunk_size",
    "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank",
)  # fmt: skip
"""Fields whose key may be null even if the default is not."""


class HFConfigReader:
    """Reader of the keys in a config.json. A missing key has its value in ``defaults`` or else
    the default of the model's configuration class. `transformers` is only imported in the latter
    case."""

    def __init__(
        self, content: dict[str, Any], path: Path, title: str, model_type: str,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.content, self.path, self.title = content, path, title
        self._model_type, self._defaults = model_type, dict(defaults or {})
        self._understood: set[str] = set()

    def fields(self, keys: Keys, activations: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Read the keys that mean the same as a flag. Return their values by :class:`ModelFlags`
        field. Raises CheckpointError if a value has the wrong type."""
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
        """Return the value of a key, which must be a positive integer."""
        value = self._value(names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(names, value, "expected a positive integer")
        return value

    def optional_whole(self, names: Names) -> int | None:
        """Return the value of a key, which must be a positive integer or null."""
        return None if self._value(names) is None else self.whole(names)

    def number(self, names: Names) -> float:
        """Return the value of a key, which must be a number."""
        value = self._value(names)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(names, value, "expected a number")
        return float(value)

    def flag(self, names: Names) -> bool:
        """Return the value of a key, which must be true or false."""
        value = self._value(names)
        if not isinstance(value, bool):
            self.refuse(names, value, "expected true or false")
        return value

    def choice(self, names: Names, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the flags in ``known`` for the value of a key, which must be one of the names
        there."""
        value = self._value(names)
        if not isinstance(value, str) or value not in known:
            self.refuse(names, value, f"expected one of {', '.join(known)}")
        return known[value]

    def table(self, name: str) -> dict[str, Any]:
        """Return the value of a key, which must be an object. If it is null or absent, return an
        empty dictionary."""
        value = self._value(name) if name in self.content else None
        if value is not None and not isinstance(value, dict):
            self.refuse(name, value, "expected an object")
        return value or {}

    def names(self, name: str) -> list[str] | None:
        """Return the value of a key, which must be a list of strings, or None if it is null or
        absent."""
        value = self._value(name) if name in self.content else None
        if value is not None and not (
            isinstance(value, list) and all(isinstance(word, str) for word in value)
        ):
            self.refuse(name, value, "expected a list of names")
        return value

    def only(self, name: str, allowed: Collection[Any], why: str) -> None:
        """Raise CheckpointError if a key is present and its value is not among ``allowed``."""
        if name in self.content and self._value(name) not in allowed:
            self.refuse(name, self.content[name], why)

    def unused(self, *names: str) -> None:
        """Accept keys without reading them, since they do not affect what the model computes."""
        self._understood.update(names)

    def refuse(self, names: Names, value: Any, why: str) -> NoReturn:
        """Raise a CheckpointError that names the file, the key and the wrong value."""
        name = names if isinstance(names, str) else names[0]
        text = f"{value!r}"
        text = text if len(text) < 200 else text[:197] + "..."
        raise CheckpointError(f"{self.path}: {name} is {text} ({self.title}): {why}")

    def refuse_the_rest(self) -> None:
        """Raise CheckpointError if keys were not read, unless they are harmless or empty."""
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
        """Return the default of a key that the file lacks. Raises CheckpointError if the installed
        `transformers` does not support this model type."""
        for name in _tuple(names):
            if name in self._defaults:
                return self._defaults[name]
        import transformers  # slow to import
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        name, model_type = _tuple(names)[0], self._model_type
        if model_type not in CONFIG_MAPPING:
            raise CheckpointError(
                f"{self.path} has no {name}, and transformers {transformers.__version__} has no "
                f"default for it ({model_type}); install a newer version, or add the key"
            )
        # Read the signature first: an instance may have derived other values from these defaults.
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
    """Read ``rotary_base``, ``rotary_percent`` and ``rope_scaling`` from a config.json. Raises
    CheckpointError if the keys of transformers 4 and 5 contradict each other or cannot be
    represented.

    Args:
        fields: fields read so far, including ``kv_channels`` and ``max_position_embeddings``.
        share_key: transformers 4's key for the rotated fraction of a head; None if heads are
            rotated whole.
        types: usual name of each scaling type that the architecture names differently.
        base: rotary base if the file has none.
    """
    newer = given.table("rope_parameters")
    share_name = share_key or "partial_rotary_factor"
    # transformers 4 writes its general keys in addition to the architecture's own.
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
    """Return the value of ``--rope-scaling``, or None without scaling. ``newer`` is the relevant
    section of ``rope_parameters``, ``rotated`` the rotated fraction of a head; see
    :func:`read_rope`."""
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
    form.pop("finetuned", None)  # a key of the YaRN authors' code
    kind = types.get(kind, kind)
    if not form.get("mscale_all_dim", True):  # 0 means unset in DeepSeek's code
        del form["mscale_all_dim"]
    if kind == "default":
        return None
    if kind in ("llama3", "yarn", "longrope"):  # these need the original length
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
    """Return a number that transformers 4 stores under one of ``names``, and transformers 5 in
    ``rope_parameters`` (``newer``). Raises CheckpointError if they differ or are not numbers."""
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
    """Return the RoPE keys for transformers 4 and 5. For ``share_key`` see :func:`read_rope`."""
    positions, newer = model.positions, json.loads(model.positions.rope_scaling.to_json())
    scaling = {} if positions.rope_scaling.is_default else {"rope_scaling": dict(newer)}
    newer["rope_theta"] = base = positions.rotary_base
    if share_key is None:
        return {theta_key: base} | scaling | {"rope_parameters": newer}
    newer["partial_rotary_factor"] = share = positions.rotary_percent
    return {theta_key: base, share_key: share} | scaling | {"rope_parameters": newer}


def short(value: float) -> float:
    """Round to 15 significant digits, so that applying a conversion and its inverse restores a
    value."""
    return float(f"{value:.15g}")


def layer_types(model: ModelConfig) -> list[str]:
    """Return ``layer_types``, the type of attention in each block."""
    return [FULL if window is None else SLIDING for window in model.windows]


def read_windows(given: HFConfigReader, window: int | None, default: list[str]) -> dict[str, Any]:
    """Read ``sliding_window`` and ``window_attn_skip_freq`` from a config.json. ``default`` has
    each block's type of attention for files without ``layer_types``."""
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
"""Default ``parts`` of :func:`read_biases`: one key for all of attention, and one for the MLP."""


def read_biases(given: HFConfigReader, parts: tuple[str, ...] = BIASES) -> dict[str, Any]:
    """Return the flags for the keys ``attention_bias`` and ``mlp_bias``. ``parts`` are the linear
    layers that may have biases: ``attention_bias`` applies to all of ``attention`` or only to
    ``qkv``, and ``mlp_bias`` to ``mlp``. Raises CheckpointError if other layers have biases."""
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
    """Return the keys for a model's biases: the inverse of :func:`read_biases`."""
    keys = {}
    if parts and parts[0] != "mlp":
        attention = model.attention
        keys["attention_bias"] = attention.proj_bias or (parts[0] == "qkv" and attention.qkv_bias)
    if "mlp" in parts:
        keys["mlp_bias"] = model.mlp.bias
    return keys
