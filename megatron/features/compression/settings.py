"""Section ``compression_training`` of DeepSpeed's JSON, with the keys and defaults of DeepSpeed
0.19.6.

Unknown keys, values of the wrong type, and techniques that cannot run raise ConfigError with their
JSON path."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.config.features import FlagSection
from megatron.config.flags import ConfigError, nearest, option
from megatron.util.json_text import parse_json

SECTION = "compression_training"
WEIGHTS, ACTIVATIONS = "weight_quantization", "activation_quantization"
SPARSE, ROW, HEAD, CHANNEL = "sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"
PRUNING = (SPARSE, ROW, HEAD)
LAYERS = "layer_reduction"

ENABLED = {
    WEIGHTS: "Weight quantization",
    ACTIVATIONS: "Activation quantization",
    SPARSE: "Sparse pruning",
    ROW: "Row pruning",
    HEAD: "Head pruning",
}
"""Description of each technique, for the log line that reports the step at which it is enabled."""

_REQUIRED = object()


class Key(NamedTuple):
    """JSON key: a check for its value, a description of valid values, and the default, if any."""

    fits: Callable[[Any], bool]
    needed: str
    default: Any = _REQUIRED


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _among(*names: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in names), " or ".join(names)


def _switch() -> Key:
    return Key(lambda value: isinstance(value, bool), "true or false", False)


def _step(default: int) -> Key:
    return Key(_is_count, "a non-negative integer", default)


_POSITIVE = (lambda value: _is_count(value, 1)), "a positive integer"
_BITS = Key(lambda value: _is_count(value, 1) and value <= 16, "a number of bits from 1 to 16")
_RATIO = Key(
    lambda value: type(value) in (int, float) and 0 < value <= 1, "a number above 0 and up to 1"
)
_TYPE = Key(*_among("symmetric", "asymmetric"), "symmetric")
_MIXED = {"enabled": _switch(), "quantize_change_ratio": _RATIO._replace(default=0.001)}


def _shared(offset: int, method: str | None = None, **others: Key) -> dict[str, Key]:
    """Return the keys that all techniques have, with their defaults, and ``others``. ``method`` is
    the default method of a pruning technique."""
    methods = {} if method is None else {"method": Key(*_among("l1", "topk"), method)}
    return {"enabled": _switch(), "schedule_offset": _step(offset), **methods, **others}


_SHARED: dict[str, dict[str, Key]] = {
    WEIGHTS: _shared(
        0,
        quantizer_kernel=_switch(),
        quantize_groups=Key(*_POSITIVE, 1),
        quantize_verbose=_switch(),
        quantization_type=_TYPE,
        rounding=Key(*_among("nearest", "stochastic"), "nearest"),
        quantize_weight_in_forward=_switch(),
        fp16_mixed_quantize=Key(lambda value: isinstance(value, dict), "an object", {}),
    ),
    ACTIVATIONS: _shared(
        1000,
        quantization_type=_TYPE,
        range_calibration=Key(*_among("dynamic", "static"), "dynamic"),
    ),
    SPARSE: _shared(1000, "l1", schedule_offset_end=_step(0)._replace(default=None)),
    ROW: _shared(1000, "l1"),
    HEAD: _shared(1000, "topk", num_heads=Key(*_POSITIVE)),
    CHANNEL: _shared(1000, "l1"),
}
_PARAMS: dict[str, dict[str, Key]] = {
    WEIGHTS: {
        "start_bits": _BITS,
        "target_bits": _BITS,
        "quantization_period": Key(*_POSITIVE, 1),
    },
    ACTIVATIONS: {"bits": Key(lambda value: value in (4, 8), "4 or 8")},
    **{kind: {"dense_ratio": _RATIO} for kind in (SPARSE, ROW, HEAD, CHANNEL)},
}
_REDUCTION = {
    "enabled": _switch(),
    "keep_number_layer": Key(*_POSITIVE, None),
    "module_name_prefix": Key(lambda value: isinstance(value, str), "a string", "encoder.layers"),
    "teacher_layer": Key(
        lambda value: isinstance(value, list) and value != [] and all(map(_is_count, value)),
        "a list of layer numbers from 0",
    ),
    "other_module_name": Key(
        lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value),
        "a list of strings",
        [],
    ),
}
_SNIP = ("block_pattern", "dense_ratio", "excluded_modules", "schedule_offset_stride")


@dataclass(frozen=True)
class ModuleGroup:
    """Modules to which a technique applies with the same parameters.

    Attributes:
        place: JSON path of the group.
        modules: patterns that match module names.
        related: for each of ``modules``, patterns for the modules that lose the same rows or heads
            when the model is cleaned. Empty if rows and heads are only set to zero.
    """

    place: str
    modules: tuple[str, ...]
    related: tuple[tuple[str, ...], ...]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Technique:
    """Enabled technique, with the settings that all its groups share."""

    kind: str
    shared: Mapping[str, Any]
    groups: tuple[ModuleGroup, ...]

    @property
    def offset(self) -> int:
        """Number of updates after which the technique is enabled."""
        return self.shared["schedule_offset"]

    @property
    def after_updates(self) -> bool:
        """True if weights are overwritten after each update, as in DeepSpeed's MoQ."""
        return self.kind == WEIGHTS and not self.shared["quantize_weight_in_forward"]


@dataclass(frozen=True)
class LayerReduction:
    """Teacher layers that a student copies, by index, and other modules that it copies."""

    prefix: str
    teacher_layers: tuple[int, ...]
    other_modules: tuple[str, ...]


@dataclass(frozen=True)
class Compression:
    """A run's compression: enabled techniques by kind, and the layer reduction, if any."""

    techniques: Mapping[str, Technique] = field(default_factory=dict)
    layers: LayerReduction | None = None

    @property
    def in_layers(self) -> bool:
        """True if layers compute with weights or inputs that differ from the stored ones."""
        return any(not technique.after_updates for technique in self.techniques.values())

    @property
    def moq(self) -> Technique | None:
        """Technique that quantises weights after each update (MoQ). None if not enabled."""
        weights = self.techniques.get(WEIGHTS)
        return weights if weights is not None and weights.after_updates else None


def compression_of(text: str | None) -> Compression | None:
    """Parse the JSON section. Return None if it is missing or enables nothing. Raises ConfigError
    if it is invalid."""
    if text is None:
        return None
    try:
        content = parse_json(text, f"{SECTION}: {text[:200]!r}")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _require_object(content, SECTION)
    _known(content, (*_SHARED, LAYERS), SECTION)
    techniques = dict(_techniques(content))
    reduction = _reduction(content.get(LAYERS, {}))
    return Compression(techniques, reduction) if techniques or reduction else None


def _techniques(content: Mapping[str, Any]) -> Iterator[tuple[str, Technique]]:
    for kind, keys in _SHARED.items():
        section, place = content.get(kind, {}), f"{SECTION}.{kind}"
        _require_object(section, place)
        _known(section, ("shared_parameters", "different_groups"), place)
        shared, at = section.get("shared_parameters", {}), f"{place}.shared_parameters"
        _require_object(shared, at)
        if shared.get("enabled", False) is False:
            _known(shared, (*keys, *(_SNIP if kind == SPARSE else ())), at)
            continue
        _refuse_kind(kind, shared, at)
        values = _values(shared, keys, at)
        if kind == WEIGHTS:
            mixed = f"{at}.fp16_mixed_quantize"
            values["fp16_mixed_quantize"] = _values(values["fp16_mixed_quantize"], _MIXED, mixed)
        groups = section.get("different_groups", {})
        _require_object(groups, f"{place}.different_groups")
        if not groups:
            raise ConfigError(f"{place} is enabled, and {place}.different_groups is empty")
        technique = Technique(kind, values, tuple(_groups(kind, groups, place)))
        _check(technique, place)
        yield kind, technique


def _refuse_kind(kind: str, shared: Mapping[str, Any], place: str) -> None:
    method = shared.get("method")
    for wrong, message in (
        (
            kind == CHANNEL,
            "enabled is true: channel pruning is of convolutions over images, which no model here "
            "has; switch it off",
        ),
        (
            kind == SPARSE and method == "snip_momentum",
            'method is "snip_momentum": it is a pruner of the package neural_compressor, for '
            "modules of one process; use l1 or topk",
        ),
        (kind == HEAD and method == "l1", 'method is "l1": heads are pruned by topk only'),
        (
            shared.get("quantizer_kernel") is True,
            "quantizer_kernel is true: DeepSpeed removed that kernel; false computes the same "
            "values",
        ),
    ):
        if wrong:
            raise ConfigError(f"{place}.{message}")


def _groups(kind: str, groups: Mapping[str, Any], place: str) -> Iterator[ModuleGroup]:
    for name, group in groups.items():
        at = f"{place}.different_groups.{name}"
        _require_object(group, at)
        _known(group, ("params", "modules", "related_modules"), at)
        params = _values(group.get("params", {}), _PARAMS[kind], f"{at}.params")
        modules = group.get("modules", ["*"])
        if modules == "*":
            modules = ["*"]
        patterns = _patterns(modules, f"{at}.modules")
        related = group.get("related_modules")
        if related is not None and kind not in (ROW, HEAD):
            raise ConfigError(f"{at}.related_modules: {kind} shrinks no dimensions; remove it")
        if related is not None and (not isinstance(related, list) or len(related) != len(patterns)):
            raise ConfigError(
                f"{at}.related_modules is {json.dumps(related)}; it must be a list with a list of "
                "patterns for each of modules"
            )
        rows = (_patterns(each, f"{at}.related_modules") for each in related or ())
        yield ModuleGroup(at, patterns, tuple(rows), params)


def _patterns(value: Any, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{place} is {json.dumps(value)}; it must be a list of patterns")
    for pattern in value:
        try:
            re.compile(pattern if pattern != "*" else "")
        except re.error as error:
            raise ConfigError(f"{place}: {pattern!r} is not a pattern ({error})") from None
    return tuple(value)


def _check(technique: Technique, place: str) -> None:
    """Raise ConfigError if a technique's settings contradict each other."""
    shared, at = technique.shared, f"{place}.shared_parameters"
    end = shared.get("schedule_offset_end")
    if end is not None and end < technique.offset:
        raise ConfigError(
            f"{at}.schedule_offset_end {end} is before schedule_offset {technique.offset}"
        )
    if technique.kind != WEIGHTS:
        return
    stochastic, mixed = shared["rounding"] == "stochastic", shared["fp16_mixed_quantize"]["enabled"]
    if shared["quantize_weight_in_forward"] and (stochastic or mixed):
        name = 'rounding "stochastic"' if stochastic else "fp16_mixed_quantize"
        raise ConfigError(
            f"{at}: {name} is of weights that are quantised after updates; with "
            "quantize_weight_in_forward weights are rounded to the nearest value, at the target "
            "bits at once"
        )
    for group in technique.groups:
        start, target = group.params["start_bits"], group.params["target_bits"]
        if start < target:
            raise ConfigError(
                f"{group.place}.params: start_bits {start}, target_bits {target}: bits fall from "
                "start_bits to target_bits; make start_bits at least as large"
            )
        if target < 3 and (stochastic or shared["quantization_type"] != "symmetric"):
            raise ConfigError(
                f"{group.place}.params.target_bits {target}: weights of 1 or 2 bits are symmetric, "
                'and rounded to the nearest value; set quantization_type "symmetric" and rounding '
                '"nearest"'
            )


def _reduction(section: Any) -> LayerReduction | None:
    place = f"{SECTION}.{LAYERS}"
    _require_object(section, place)
    if section.get("enabled", False) is False:
        _known(section, tuple(_REDUCTION), place)
        return None
    values = _values(section, _REDUCTION, place)
    layers, kept = tuple(values["teacher_layer"]), values["keep_number_layer"]
    if kept is not None and kept != len(layers):
        raise ConfigError(
            f"{place}.keep_number_layer is {kept}, and teacher_layer has {len(layers)} numbers"
        )
    return LayerReduction(values["module_name_prefix"], layers, tuple(values["other_module_name"]))


def _values(section: Any, keys: Mapping[str, Key], place: str) -> dict[str, Any]:
    """Return the value of each key, or its default if the section lacks it. Raises ConfigError if a
    value is invalid."""
    _require_object(section, place)
    _known(section, tuple(keys), place)
    values = {}
    for name, key in keys.items():
        if name not in section:
            if key.default is _REQUIRED:
                raise ConfigError(f"{place}.{name} is missing; it must be {key.needed}")
            values[name] = key.default
        elif not key.fits(section[name]):
            raise ConfigError(
                f"{place}.{name} is {json.dumps(section[name])}; it must be {key.needed}"
            )
        else:
            values[name] = section[name]
    return values


def _known(section: Mapping[str, Any], keys: tuple[str, ...], place: str) -> None:
    for name in section:
        if name not in keys:
            raise ConfigError(
                f'unknown key "{name}" in {place}{nearest(name, keys, "; did you mean {}?")}'
            )


def _require_object(value: Any, place: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {json.dumps(value)}; it must be an object")


@dataclass(frozen=True)
class CompressionConfig(FlagSection):
    """Compression: quantised weights and activations, pruning, layer reduction."""

    compression_training: str | None = option(None)
    """Compression during training, in the format of DeepSpeed's "compression_training" section."""

    def __post_init__(self) -> None:
        compression_of(self.compression_training)

    @property
    def chosen(self) -> Compression | None:
        """Compression of the run; None if nothing is compressed."""
        return compression_of(self.compression_training)
