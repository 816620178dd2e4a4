"""DeepSpeed's JSON and the flags are one configuration.

What the JSON leaves ``"auto"`` (or out) is filled from the flags; what the flags leave unset comes
from the JSON; where both speak, they must agree.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from megatron.config import FLAG_CLASSES, ConfigError, RunConfig, Setting, Settings
from megatron.config.flags import check_value
from megatron.config.layouts import check_layout
from megatron.engine.json_keys import CURRICULA, PAIRS, Json, autos, drop_auto, get, put

_FIELDS = {
    field.name: (field, types[field.name])
    for part in FLAG_CLASSES
    for types in (typing.get_type_hints(part),)
    for field in dataclasses.fields(part)
}


def merge(flags: Settings, content: Json, path: str, world_size: int) -> Settings:
    """Adds the JSON's values to the settings from flags.

    Args:
        flags: settings that came from the command line.
        content: the JSON.
        path: its file, for messages.
        world_size: number of processes.

    Raises:
        ConfigError: a flag and the JSON contradict each other; names both values and places.
    """
    merged = dict(flags)
    name = Path(path).name
    for pair in PAIRS:
        value = get(content, pair.key)
        if value is None or value == "auto":
            continue
        try:
            setting = Setting(pair.decode(value), f"{name}: {pair.key}")
        except (TypeError, OverflowError):
            raise ConfigError(f"{path}: {pair.key} is {value!r}, not a valid value") from None
        setting = check_value(*_FIELDS[pair.field], setting)
        given = flags.get(pair.field)
        if given is None:
            merged[pair.field] = setting
        elif given.value != setting.value:
            raise ConfigError(
                f"{given.origin.removeprefix('flag ')} {given.value} contradicts {pair.key} "
                f'{json.dumps(value)} in {path}; make them equal, or set the JSON to "auto"'
            )
    return _with_accumulation(merged, content, path, world_size)


def _with_accumulation(settings: Settings, content: Json, path: str, world: int) -> Settings:
    """Uses or checks gradient_accumulation_steps, which has no flag of its own."""
    steps = content.get("gradient_accumulation_steps", "auto")
    if steps == "auto":
        return settings
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"{path}: gradient_accumulation_steps is {steps!r}, not a count")

    def value(field: str, default: Any = None) -> Any:
        return settings[field].value if field in settings else default

    def place(field: str) -> str:
        return f"{settings[field].origin.removeprefix('flag ')} {value(field)}"

    model = value("tensor_model_parallel_size", 1) * value("pipeline_model_parallel_size", 1)
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
    """The JSON with every ``"auto"`` filled and everything that the flags determine written out.

    Raises:
        ConfigError: an ``"auto"`` is left where no flag stands for the key, or the combination is
            one that DeepSpeed gets wrong.
    """
    values = {name: value for part in config.to_dict().values() for name, value in part.items()}
    result = copy.deepcopy(content)
    for pair in PAIRS:
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
            f'{config.engine.deepspeed_config}: "auto" at {", ".join(left)}: no flag stands for '
            "this key; give a value or leave it out"
        )
    _refuse(result, config)
    return result


def _refuse(content: Json, config: RunConfig) -> None:
    path = config.engine.deepspeed_config
    if content.get("bf16", {}).get("check_grad_overflow") is False:
        raise ConfigError(
            f"{path}: bf16.check_grad_overflow false would let gradients that are not finite into "
            "the weights; remove the key (--no-check-for-nan-in-loss-and-grad skips such steps)"
        )
    if get(content, "flops_profiler.enabled") and config.parallel.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"{path}: flops_profiler.enabled true, --pipeline-model-parallel-size "
            f"{config.parallel.pipeline_model_parallel_size}: the profiler measures the engine's "
            "forward pass, which a pipeline does not have as a whole; remove the key, or profile "
            "without a pipeline"
        )
    check_layout(config.layout(content))


def for_engine(content: Json, config: RunConfig, on_cpu: bool) -> Json:
    """What ``deepspeed.initialize`` is given: the JSON, less what the trainer does itself.

    The optimizer, its schedule and the curriculum are the trainer's. At stage 0 the trainer also
    clips, since DeepSpeed reports no norm there, and bf16 runs as autocast, since DeepSpeed's
    half-precision optimizers take a stray first step at that stage.
    """
    result = copy.deepcopy(content)
    result.pop("optimizer", None)
    for key in CURRICULA:
        result.pop(key, None)
    result.setdefault("steps_per_print", 2**62)
    # torch's AdamW does the offloaded step, so that nothing has to be compiled.
    result["zero_force_ds_cpu_optimizer"] = False
    result["zero_allow_untested_optimizer"] = True
    if config.precision.accumulate_allreduce_grads_in_fp32:
        # DeepSpeed would accumulate in float32 and then reduce in half precision.
        result.setdefault("communication_data_type", "fp32")
    if config.precision.bf16:
        # Some versions would let gradients that are not finite into the weights.
        result["bf16"]["check_grad_overflow"] = True
    if config.engine.zero_stage == 0:
        result["gradient_clipping"] = 0.0
        if config.precision.bf16:
            result["bf16"]["enabled"] = False
            result["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if on_cpu:
        for key in ("zero_quantized_weights", "zero_quantized_gradients"):
            if result.get("zero_optimization", {}).get(key):
                raise ConfigError(
                    f"{config.engine.deepspeed_config}: zero_optimization.{key} runs on GPUs only"
                )
    return result
