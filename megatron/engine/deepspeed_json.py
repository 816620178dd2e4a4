"""DeepSpeed's JSON and the flags are one configuration.

Values that the JSON leaves ``"auto"`` or omits are filled from the flags. Values that the flags
leave unset come from the JSON. Where both give a value, they must agree. ``deepspeed_file.py``
reads the file.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config import FLAG_FIELDS, ConfigError, RunConfig, Setting, Settings
from megatron.config.engine import GRAPH_MODES, NO_GRAPHS
from megatron.config.features import features
from megatron.config.flags import check_value
from megatron.config.layouts import check_layout
from megatron.util.files import read_sections

Json = dict[str, Any]

TABLES = {
    section: {key: words for keys, words in lines.items() for key in keys.split()}
    for section, lines in read_sections(Path(__file__).with_name("deepspeed_keys.txt")).items()
}
"""Messages about JSON keys, by section of ``deepspeed_keys.txt`` and key."""
REMOVED = TABLES["removed"]
"""Keys that DeepSpeed refuses even if they are off, each with the first version that does."""
OPTIMIZERS = TABLES["optimizers"]
"""Flags to use instead, by name of an optimizer from DeepSpeed or torch.optim."""


@dataclass(frozen=True)
class Pair:
    """A dotted JSON key (a number indexes a list) and the config field with the same meaning.
    ``decode`` converts the JSON's value to the field's, and ``encode`` converts it back. The key is
    omitted if ``encode`` returns None."""

    key: str
    field: str
    decode: Callable[[Any], Any] = lambda value: value
    encode: Callable[[Any], Any] = lambda value: value


def _optimizer(name: Any) -> str:
    lower = str(name).lower()
    known = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "lion": "lion"}.get(lower)
    if known is None:
        remedy = OPTIMIZERS.get(lower, "--optimizer has those of this trainer (--help)")
        raise ConfigError(
            f'optimizer.type "{name}": AdamW, Adam (both with decoupled weight decay), SGD and '
            f"Lion are the optimizers of the JSON; {remedy}"
        )
    return known


def _whole(number: Any) -> Any:
    """Convert a float that is a whole number, such as JSON's 5e8, to an int."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


OWN_SECTIONS = tuple(name for feature in features().values() for name in feature.json_sections)
"""JSON sections that features read instead of DeepSpeed, as config fields of the same names."""


ZERO = "zero_optimization"


def section_text(section: Any) -> str:
    return json.dumps(section, sort_keys=True)


PAIRS = (
    Pair("train_micro_batch_size_per_gpu", "micro_batch_size"),
    Pair("train_batch_size", "global_batch_size"),
    Pair("gradient_clipping", "clip_grad"),
    Pair("zero_optimization.stage", "zero_stage"),
    *(
        Pair(f"zero_optimization.{key}", f"zero_{key}", _whole)
        for key in (
            *("reduce_scatter", "contiguous_gradients", "reduce_bucket_size"),
            "allgather_bucket_size",
        )
    ),
    # Omitted if the flag is on, its default. DeepSpeed's default then applies: overlap at stage 3.
    Pair("zero_optimization.overlap_comm", "overlap_grad_reduce", encode=lambda on: on and None),
    Pair("zero_optimization.offload_param.device", "remote_device"),
    Pair("zero_optimization.offload_param.pin_memory", "use_pin_memory"),
    Pair("bf16.enabled", "bf16"),
    Pair("fp16.enabled", "fp16"),
    Pair("fp16.loss_scale", "loss_scale", lambda v: v or None, lambda v: v or 0),
    Pair(
        "fp16.initial_scale_power",
        "initial_loss_scale",
        lambda power: 2.0**power,
        lambda scale: int(math.log2(scale)),
    ),
    Pair("fp16.loss_scale_window", "loss_scale_window"),
    Pair("fp16.hysteresis", "hysteresis"),
    Pair("fp16.min_loss_scale", "min_loss_scale"),
    Pair(
        "data_types.grad_accum_dtype",
        "accumulate_allreduce_grads_in_fp32",
        lambda name: name == "fp32",
        lambda on: "fp32" if on else None,
    ),
    Pair("optimizer.type", "optimizer", _optimizer, {"adam": "AdamW", "sgd": "SGD"}.get),
    Pair("optimizer.params.lr", "lr"),
    Pair("optimizer.params.betas.0", "adam_beta1"),
    Pair("optimizer.params.betas.1", "adam_beta2"),
    Pair("optimizer.params.eps", "adam_eps"),
    Pair("optimizer.params.weight_decay", "weight_decay"),
    Pair("optimizer.params.momentum", "sgd_momentum"),
    *(Pair(key, key, section_text, lambda t: t and json.loads(t)) for key in OWN_SECTIONS),
)

_BETAS = {
    "lion": {
        "optimizer.params.betas.0": ("lion_beta1", 0.9),
        "optimizer.params.betas.1": ("lion_beta2", 0.999),
    }
}
"""Fields for the ``betas`` of optimizers other than Adam, with DeepSpeed's default values."""


def _pairs(content: Json) -> Sequence[Pair]:
    """Return :data:`PAIRS`, with the fields for the ``betas`` of the optimizer in the JSON."""
    fields = _BETAS.get(str(get(content, "optimizer.type")).lower(), {})
    return [replace(p, field=fields[p.key][0]) if p.key in fields else p for p in PAIRS]


def _defaults(content: Json) -> dict[str, Any]:
    """Return DeepSpeed's defaults for keys whose flags have other defaults, to be used if the JSON
    omits them: with the flags' loss scale of 2^32 the first steps would be skipped."""
    fields = _BETAS.get(str(get(content, "optimizer.type")).lower(), {})
    scale = {"fp16.initial_scale_power": 16} if get(content, "fp16.enabled") is True else {}
    return {key: default for key, (_, default) in fields.items()} | scale


MAX_GRAD_NORM = Pair("optimizer.params.max_grad_norm", "clip_grad")
"""Key for gradient_clipping in JSON files for older DeepSpeed versions; newer ones refuse it."""

ULYSSES = Pair("sequence_parallel_size", "ds_sequence_parallel_size")
"""Key that is not passed to DeepSpeed, because the trainer splits sequences itself."""

_FILLED: dict[str, Callable[[RunConfig], Any]] = {
    "steps_per_print": lambda config: config.logging.log_interval,
    "prescale_gradients": lambda config: config.engine.zero_stage == 0,
}
"""Keys without a flag, each with a function of the configuration whose result replaces "auto"."""


def merge(flags: Settings, content: Json, path: str, world_size: int) -> Settings:
    """Add the values of the JSON at ``path`` to the settings from flags. Raises ConfigError if a
    flag and the JSON contradict each other; the message has both values and sources."""
    name = Path(path).name
    flags = _with_scale(flags, content, name)
    merged = dict(flags)
    defaults = _defaults(content)
    for pair in (*_pairs(content), MAX_GRAD_NORM, ULYSSES):
        value = get(content, pair.key)
        if value is None and pair.field not in flags:
            value = defaults.get(pair.key)
        if value is None or value == "auto":
            continue
        try:
            setting = Setting(pair.decode(value), f"{name}: {pair.key}")
        except (TypeError, OverflowError):
            raise ConfigError(f"{path}: {pair.key} is {value!r}, not a valid value") from None
        setting = check_value(*FLAG_FIELDS[pair.field], setting)
        given = merged.get(pair.field)
        if given is None:
            merged[pair.field] = setting
        elif given.value != setting.value:
            raise ConfigError(
                f"{given.origin.removeprefix('flag ')} {given.value} contradicts {pair.key} "
                f'{json.dumps(value)} in {path}; make them equal, or set the JSON to "auto"'
            )
    return _with_accumulation(merged, content, path, world_size)


def _with_scale(flags: Settings, content: Json, name: str) -> Settings:
    """Return the flags without a static loss scale if the JSON has a dynamic one. Scripts for
    Megatron-DeepSpeed pass a power of two as ``--loss-scale`` and rely on this."""
    scale, section = flags.get("loss_scale"), content.get("fp16")
    if scale is None or scale.value is None:
        return flags
    if not isinstance(section, dict) or section.get("loss_scale"):
        return flags
    shown = f"{scale.origin.removeprefix('flag ')} {scale.value:g}"
    return {**flags, "loss_scale": Setting(None, f"{name}: fp16 instead of {shown}")}


def _with_accumulation(settings: Settings, content: Json, path: str, world: int) -> Settings:
    """Derive a missing batch size from gradient_accumulation_steps, or check the given ones."""
    steps = content.get("gradient_accumulation_steps", "auto")
    if steps == "auto":
        return settings
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(
            f"{path}: gradient_accumulation_steps is {steps!r}; expected a positive integer"
        )

    def value(field: str, default: Any = None) -> Any:
        return settings[field].value if field in settings else default

    def place(field: str) -> str:
        return f"{settings[field].origin.removeprefix('flag ')} {value(field)}"

    model = value("tensor_model_parallel_size", 1) * value("pipeline_model_parallel_size", 1)
    model *= value("context_parallel_size") or value("ds_sequence_parallel_size", 1)
    if model < 1 or world % model:
        return settings  # refused later, with the layout's own message
    replicas = world // model
    micro, whole = value("micro_batch_size"), value("global_batch_size")
    origin = f"{Path(path).name}: gradient_accumulation_steps"
    if micro is None and whole is not None and whole % (steps * replicas) == 0:
        return settings | {"micro_batch_size": Setting(whole // (steps * replicas), origin)}
    if micro is not None and whole is None:
        return settings | {"global_batch_size": Setting(micro * steps * replicas, origin)}
    if micro is not None and whole != micro * steps * replicas:
        raise ConfigError(
            f"gradient_accumulation_steps {steps} in {path} contradicts "
            f"{place('global_batch_size')} = {place('micro_batch_size')} x {replicas} "
            f"data-parallel processes x {whole / (micro * replicas):g} steps; set it to "
            '"auto"'
        )
    return settings


def complete(content: Json, config: RunConfig) -> Json:
    """Return the JSON with every ``"auto"`` filled in, all flag values written out, and keys left
    out that DeepSpeed no longer has. Raises ConfigError if an ``"auto"`` remains because no flag
    has the key's meaning, or if DeepSpeed handles the combination incorrectly."""
    values = {name: value for part in config.to_dict().values() for name, value in part.items()}
    result = copy.deepcopy(content)
    for key, _ in removed_keys(content):
        drop(result, key)
    for left_out in (MAX_GRAD_NORM, ULYSSES):
        drop(result, left_out.key)
    for key, fill in _FILLED.items():
        if result.get(key) == "auto":
            result[key] = fill(config)
    for pair in _pairs(content):
        section = pair.key.split(".")[0]
        if section == "fp16" and not config.precision.fp16 and pair.key != "fp16.enabled":
            drop_auto(result, pair.key)
            continue
        if pair.key.startswith("optimizer.params"):
            used = {"momentum"} if config.optimizer.optimizer == "sgd" else {"betas", "eps"}
            if pair.key.split(".")[2] not in used | {"lr", "weight_decay"}:
                drop_auto(result, pair.key)
                continue
        encoded = pair.encode(values[pair.field])
        if encoded is None:
            drop_auto(result, pair.key)
        else:
            put(result, pair.key, encoded)
    samples = config.training.micro_batch_size * config.parallel.data_parallel_size
    result["gradient_accumulation_steps"] = config.training.global_batch_size // samples
    left = list(autos(result))
    if left:
        raise ConfigError(
            f'{config.engine.deepspeed_config}: "auto" at {", ".join(left)}: no flag sets '
            "this key; give a value or leave it out"
        )
    check_layout(config.layout(result))
    feature_notes(result, config)
    mode = config.fast_paths.torch_compile_mode
    if mode in GRAPH_MODES and running_stage(result, config) == 3:
        raise ConfigError(
            f"--torch-compile-mode {mode}, --zero-stage 3: a CUDA graph reads weights where they "
            f"were when it was recorded, and stage 3 gathers them again each time; {NO_GRAPHS}"
        )
    return result


_ONLY_AT_STAGE_3 = tuple(
    f"zero_quantized_{name}" for name in ("weights", "nontrainable_weights", "gradients")
)
"""Keys of zero_optimization that change the results of stage 3 even on one data-parallel rank."""


def running_stage(content: Json, config: RunConfig) -> int:
    """Return the ZeRO stage that the engine runs. On one data-parallel rank it can differ from the
    requested stage (:attr:`Layout.running_zero`), unless checkpoints are in DeepSpeed's own format,
    so that DeepSpeed can resume at the stage, or a key in :data:`_ONLY_AT_STAGE_3` is set."""
    layout, zero = config.layout(content), content.get("zero_optimization", {})
    kept = config.checkpoint.checkpoint_format == "deepspeed" or any(
        zero.get(key) for key in _ONLY_AT_STAGE_3
    )
    return layout.zero if kept else layout.running_zero


def stage_notes(content: Json, config: RunConfig) -> list[str]:
    """Return a note for the user if the ZeRO stage that runs differs from the requested one."""
    asked, runs = config.engine.zero_stage, running_stage(content, config)
    if asked == runs:
        return []
    nothing = f"ZeRO {asked} over one data-parallel rank partitions nothing"
    return [f"{nothing}: it runs as ZeRO {runs}"]


def feature_notes(content: Json, config: RunConfig) -> list[str]:
    """Return notes for the user from features that implement keys of the completed JSON. Raises
    ConfigError if the JSON contradicts the run's configuration."""
    return [line for f in features().values() for line in f.check_engine(content, config)]


def stage_of(settings: Json) -> int:
    """Return the ZeRO stage that runs, from settings that :func:`for_engine` returned."""
    return settings["zero_optimization"]["stage"]


def for_engine(content: Json, config: RunConfig, on_cpu: bool) -> Json:
    """Return the JSON for ``deepspeed.initialize``, with the stage that runs, and without what the
    trainer does itself: the optimizer, its schedule and the curriculum. At stage 0 it also omits
    clipping, since DeepSpeed reports no norm there, and bf16, since DeepSpeed's half-precision
    optimizers make an additional first step there."""
    result = copy.deepcopy(content)
    put(result, "zero_optimization.stage", running_stage(content, config))
    # DeepSpeed counts samples once for each rank, and context-parallel ranks share samples.
    result["train_batch_size"] *= config.parallel.context_parallel_size
    result.pop("optimizer", None)
    for key in OWN_SECTIONS:
        result.pop(key, None)
    result.setdefault("steps_per_print", 2**62)
    # Offloaded steps use torch's AdamW, so that nothing has to be compiled.
    result["zero_force_ds_cpu_optimizer"] = False
    result["zero_allow_untested_optimizer"] = True
    if config.precision.accumulate_allreduce_grads_in_fp32:
        # DeepSpeed would accumulate in float32 and then reduce in half precision.
        result.setdefault("communication_data_type", "fp32")
    if config.precision.bf16:
        # Without the check, some DeepSpeed versions update the weights with non-finite gradients.
        result["bf16"]["check_grad_overflow"] = True
    if config.engine.zero_stage == 0:
        result["gradient_clipping"] = 0.0
        if config.precision.fp16:
            # DeepSpeed cannot sum gradients in float32 at stage 0; our optimizer does.
            result.pop("data_types", None)
        if config.precision.bf16:
            result["bf16"]["enabled"] = False
            result["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    for feature in features().values():
        feature.engine_settings(result, on_cpu)
    return result


def removed_keys(content: Json) -> Iterator[tuple[str, Any]]:
    """Yield the keys of :data:`REMOVED` that the JSON contains, with their values."""
    for key in REMOVED:
        section, _, name = key.rpartition(".")
        node = content.get(section) if section else content
        if isinstance(node, dict) and name in node:
            yield key, node[name]


def get(content: Any, key: str) -> Any:
    """Return a dotted key's value: None if it is missing, "auto" if a section above it is."""
    for part in key.split("."):
        if isinstance(content, list):
            content = content[int(part)] if int(part) < len(content) else None
        elif isinstance(content, dict):
            content = content.get(part)
        else:
            return content if content == "auto" else None
    return content


def offloads(content: Json, key: str) -> bool:
    """Return whether the JSON sets a device for ``offload_optimizer`` or ``offload_param``."""
    return get(content, f"zero_optimization.{key}.device") not in (None, "none")


def put(content: Json, key: str, value: Any) -> None:
    """Set a dotted key, creating the sections that contain it."""
    *sections, last = key.split(".")
    node: Any = content
    for part, following in zip(sections, (*sections, last)[1:], strict=True):
        if node.get(part) in (None, "auto"):
            node[part] = [None, None] if following.isdigit() else {}
        node = node[part]
    if isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value


def drop(content: Json, key: str) -> None:
    """Remove a dotted key from the section that contains it."""
    section, _, name = key.rpartition(".")
    node = get(content, section) if section else content
    if isinstance(node, dict):
        node.pop(name, None)


def drop_auto(content: Json, key: str) -> None:
    """Remove a key whose value is "auto", or the list or "auto" section that would contain it."""
    *sections, last = key.split(".")
    node = get(content, ".".join(sections)) if sections else content
    if isinstance(node, dict):
        if node.get(last) == "auto":
            del node[last]
    elif node is not None:
        *outer, name = sections
        parent = get(content, ".".join(outer)) if outer else content
        parent.pop(name)


def autos(node: Any, path: str = "") -> Iterator[str]:
    if node == "auto":
        yield path
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from autos(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list):
        for place, value in enumerate(node):
            yield from autos(value, f"{path}.{place}")
