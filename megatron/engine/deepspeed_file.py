"""A DeepSpeed JSON file as users have it: read, and refused by name where DeepSpeed or this trainer
would misunderstand it, ignore it, or fail on it later."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.config.features import features
from megatron.config.flags import nearest
from megatron.engine.deepspeed_json import (
    MAX_GRAD_NORM,
    PAIRS,
    REMOVED,
    TABLES,
    ZERO,
    Json,
    get,
    removed_keys,
    section_text,
)
from megatron.util.json_text import parse_json

_FIXED_OPTIMIZER_PARAMS: Json = {
    "adam_w_mode": True,
    "amsgrad": False,
    "bias_correction": True,
    "nesterov": False,
}
"""Fixed in the trainer's optimizers; another value would be ignored, and is refused."""

_IMPLEMENTATIONS = frozenset({"torch_adam", "fused", "foreach"})
"""Optimizer parameters that choose a kernel and do not change the result."""

_KNOWN_KEYS = frozenset(TABLES["known"])
_NEWER_KEYS = TABLES["newer"]
_REFUSED = TABLES["refused"]
_INSTEAD = TABLES["instead"]
_DEPRECATED = TABLES["deprecated"]
_VALUES = TABLES["values"]
_AUTOMATIC = TABLES["placeholders"]

_OFFLOAD = ("offload_optimizer", "offload_param")

_DEVICES = ("none", "cpu", "nvme")
"""Devices to which states can be offloaded."""

_SECTIONS = tuple(
    """tensorboard wandb csv_monitor comet comms_logger flops_profiler aio timers data_efficiency
    data_types""".split()
)
"""Keys with an object, besides those of :data:`PAIRS`."""

_LEVELS = "debug, info, warning, error or critical"

_LIBRARIES = {"wandb": "wandb", "comet": "comet_ml"}
"""Sections that need a package."""

_WRITES = ("tensorboard.output_path", "csv_monitor.output_path", "flops_profiler.output_file")


def file_notes(content: Json, path: str) -> list[str]:
    """Lines for the user about the JSON at ``path``: keys that are left out or without effect, and
    each place that DeepSpeed writes or sends to because the JSON says so; a foreign JSON may name
    any."""
    notes = [
        f"{path}: {key} is off, and is left out: DeepSpeed refuses the key itself since "
        f"{REMOVED[key]}"
        for key, _ in removed_keys(content)
    ]
    for key, since in (("curriculum_learning", "0.19.8"), ("compression_training", "0.19.7")):
        if isinstance(content.get(key), dict):
            notes.append(
                f"{path}: {key} is read by the trainer, and is left out for DeepSpeed, which "
                f"refuses the key since {since}"
            )
    if get(content, "aio.thread_count") is not None:
        notes.append(
            f"{path}: aio.thread_count has no effect in DeepSpeed 0.19; the key is now "
            "aio.intra_op_parallelism"
        )
    if content.get("use_data_before_expert_parallelism"):
        notes.append(
            f"{path}: use_data_before_expert_parallelism has no effect: "
            "--expert-model-parallel-size divides experts over neighbouring ranks"
        )
    for key in _WRITES:
        place = get(content, key)
        if place and get(content, f"{key.split('.')[0]}.enabled") is True:
            notes.append(f"{path}: {key} makes DeepSpeed write to {place}")
    for key, library in _LIBRARIES.items():
        if get(content, f"{key}.enabled") is True:
            notes.append(f"{path}: {key} makes DeepSpeed send metrics to the service of {library}")
    return notes


def read_json(path: str) -> Json:
    """Reads a DeepSpeed JSON file. Raises ConfigError if the file is missing or not a JSON object,
    or has an unknown or refused key. The object is without refused sections that are off."""
    try:
        source = Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"--deepspeed_config {path}: file not found") from None
    except OSError as error:
        raise ConfigError(f"--deepspeed_config {path} cannot be read: {error.strerror}") from None
    text = source.decode(errors="replace")
    try:
        content = parse_json(source, f"--deepspeed_config {path}")
    except ValueError as error:
        _refuse_placeholders(_STRING.sub('""', text), path, _BARE)
        raise ConfigError(str(error)) from None
    if not isinstance(content, dict):
        raise ConfigError(f"--deepspeed_config {path}: expected a JSON object")
    _refuse_placeholders(text, path, _QUOTED)
    _check_keys(content, path)
    _check_removed(content, path)
    _check_sections(content, path)
    _check_values(content, path)
    _check_offload(content, path)
    _check_optimizer(content, path)
    _check_own_sections(content, path)
    # DeepSpeed's own readers of these sections may refuse the switch, or act without looking at it.
    return {key: value for key, value in content.items() if not _is_off(key, value)}


_NAMES = (
    r"(?:CONFIG_[A-Z_]+|LOG_INTERVAL|ZERO_STAGE|PRESCALE_GRAD|GBSIZE|MBSIZE|LTD_(?:ENABLED|MIN|MAX"
    r"|STEP)|CL_(?:ENABLED|CLUSTER_PATH|(?:1st|2nd)_[A-Z_]+)|DATA_EFFICIENCY_SEED"
    r"|DATA_SAMPLING_NUM_WORKERS|OFFLOAD_DEVICE|SP)"
)
_QUOTED = re.compile(rf'"({_NAMES})"')
"""A placeholder of the templates of Megatron-DeepSpeed's scripts, in a file that is JSON."""
_BARE = re.compile(rf"[:,\[{{]\s*({_NAMES}\b|\$(?:\w+|\{{\w+\}})|[A-Z][A-Z0-9_]{{2,}}\b)")
"""One outside of strings, or a variable of a shell: the file is not JSON then."""
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"?')  # one that does not end is read once


def _refuse_placeholders(text: str, path: str, pattern: re.Pattern[str]) -> None:
    """Refuses a template that still has a placeholder."""
    match = pattern.search(text)
    if match is None:
        return
    name, line = match[1], text.count("\n", 0, match.start(1)) + 1
    filled = "the script of this template replaces it by a value"
    if name in _AUTOMATIC:
        filled += f'; "auto" in its place is filled by the trainer: {_AUTOMATIC[name]}'
    raise ConfigError(f"{path}, line {line}: the placeholder {name} is not filled; {filled}")


def _check_keys(content: Json, path: str) -> None:
    """Refuses keys at the top that DeepSpeed or the trainer does not read."""
    removed = {key for key in REMOVED if "." not in key}
    known = _KNOWN_KEYS | removed | _NEWER_KEYS.keys()
    for key, value in content.items():
        if key in _REFUSED and not _is_off(key, value):
            raise ConfigError(f'{path}: "{key}": {_REFUSED[key]}; remove the key')
        if key not in known | _REFUSED.keys():
            hint = nearest(key, known - removed, '; the nearest known key is "{}"')
            raise ConfigError(f'{path}: DeepSpeed has no key "{key}"{hint}')
        since = _NEWER_KEYS.get(key)
        if since and _numbers(version("deepspeed")) < _numbers(since):
            raise ConfigError(
                f'{path}: DeepSpeed {version("deepspeed")} has no key "{key}", which came with '
                f"{since}; remove the key"
            )


def _is_off(key: str, value: Any) -> bool:
    """True for a section that the trainer would refuse, but that switches nothing on."""
    return key in _REFUSED and isinstance(value, dict) and value.get("enabled") is False


def _check_removed(content: Json, path: str) -> None:
    """Refuses keys that DeepSpeed has removed if they are on, or neither on nor off."""
    for key, value in removed_keys(content):
        places = list(_switched_on(key, value, path))
        if places:
            raise ConfigError(
                f"{path}: {' and '.join(places)} {'is' if len(places) == 1 else 'are'} on, and "
                f"DeepSpeed removed {key} in {REMOVED[key]}: {_INSTEAD[key]}; remove the key, or "
                "switch it off"
            )


def _switched_on(key: str, value: Any, path: str) -> Iterator[str]:
    """The places at which the value of a removed key switches something on."""
    if key == f"{ZERO}.mics_shard_size" and value is not None:
        if type(value) is not int:
            raise ConfigError(f"{path}: {key} is {shown(value)}; it must be an integer")
        if value > 0:
            yield f"{key} {value}"
    elif isinstance(value, dict) and key in ("sparse_attention", f"{ZERO}.zeropp_loco_param"):
        # Without a switch: on as soon as it says anything.
        if value.get("enabled", bool(value)):
            yield key
    elif isinstance(value, dict):
        yield from _switched_on(f"{key}.enabled", value.get("enabled", False), path)
    elif value not in (None, True, False) or type(value) in (int, float):
        raise ConfigError(f"{path}: {key} is {shown(value)}; it must be true or false")
    elif value:
        yield key


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0]))


def _check_sections(content: Json, path: str) -> None:
    """Refuses a plain value where known keys are in an object or a list."""
    keys = [f"zero_optimization.{key}.device" for key in _OFFLOAD]
    keys += [*_VALUES, *(f"{name}.enabled" for name in _SECTIONS)]
    for key in (*(pair.key for pair in PAIRS), *keys):
        sections = key.split(".")[:-1]
        for depth in range(1, len(sections) + 1):
            name = ".".join(sections[:depth])
            section = get(content, name)
            if section is None or section == "auto":
                continue
            needed = None if isinstance(section, dict) else "an object"
            if name == "optimizer.params.betas":
                fits = isinstance(section, list) and len(section) == 2
                needed = None if fits else "a list of two numbers"
            if needed:
                raise ConfigError(f"{path}: {name} is {json.dumps(section)}; it must be {needed}")


def _check_values(content: Json, path: str) -> None:
    """Refuses what DeepSpeed would fail on in the middle of a run."""
    for key, wanted in _VALUES.items():
        value = get(content, key)
        if value is None or value == "auto":
            continue
        fits = {
            "true or false": isinstance(value, bool),
            "a positive integer": type(value) is int and value > 0,
            "an integer": type(value) is int,
            "a string": isinstance(value, str),
            _LEVELS: value in _LEVELS.replace(" or ", ", ").split(", "),
        }[wanted]
        if not fits:
            raise ConfigError(f"{path}: {key} is {shown(value)}; it must be {wanted}")
    if get(content, "bf16.enabled") is True and get(content, "fp16.enabled") is True:
        raise ConfigError(f"{path}: bf16.enabled and fp16.enabled are both true; set one to false")
    for key in _LIBRARIES:
        if get(content, f"{key}.enabled") is True and find_spec(_LIBRARIES[key]) is None:
            raise ConfigError(
                f"{path}: {key}.enabled is true, and the package {_LIBRARIES[key]} is not "
                "installed; install it, or remove the section"
            )


def shown(value: Any) -> str:
    """A value of a JSON file, for messages."""
    text = json.dumps(value, default=str)
    return text if len(text) < 200 else f"{text[:200]}..."


def _check_offload(content: Json, path: str) -> None:
    zero = get(content, "zero_optimization")
    if not isinstance(zero, dict):
        return
    for key, now in _DEPRECATED.items():
        if key in zero:
            raise ConfigError(f"{path}: zero_optimization.{key} is deprecated; use {now}")
    for key in _OFFLOAD:
        name = f"zero_optimization.{key}"
        section = zero.get(key)
        if not isinstance(section, dict):
            continue
        device = section.get("device", "none")
        if device != "auto" and device not in _DEVICES:
            raise ConfigError(
                f"{path}: {name}.device is {json.dumps(device)}; it must be cpu, nvme or none"
            )


def _check_optimizer(content: Json, path: str) -> None:
    params = get(content, "optimizer.params")
    if not isinstance(params, dict):
        return
    pairs = (*PAIRS, MAX_GRAD_NORM)
    paired = {p.key.split(".")[2] for p in pairs if p.key.startswith("optimizer.params.")}
    known = paired | _IMPLEMENTATIONS | set(_FIXED_OPTIMIZER_PARAMS)
    for key, value in params.items():
        if key not in known:
            hint = nearest(key, known, '; the nearest known one is "{}"')
            raise ConfigError(f'{path}: unknown key "{key}" in optimizer.params{hint}')
        if key in _FIXED_OPTIMIZER_PARAMS and value is not _FIXED_OPTIMIZER_PARAMS[key]:
            raise ConfigError(
                f"{path}: optimizer.params.{key} is {json.dumps(value)}, but this trainer's "
                f"optimizers use {json.dumps(_FIXED_OPTIMIZER_PARAMS[key])}; remove the key"
            )


def _check_own_sections(content: Json, path: str) -> None:
    for feature in features().values():
        given = {key: content.get(key, "auto") for key in feature.json_sections}
        texts = {key: section_text(value) for key, value in given.items() if value != "auto"}
        try:
            feature.check_json(texts)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def check_settings(settings: Json, path: str) -> None:
    """Raises ConfigError, naming the JSON at ``path`` and the key, for what DeepSpeed refuses in
    settings that :func:`for_engine` returned."""
    from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
    from pydantic import ValidationError

    # DeepSpeed compares this one with the number of processes.
    settings = {key: value for key, value in settings.items() if key != "train_batch_size"}
    try:
        for name in settings.get("data_types", {}).values():
            if name is not None:
                DtypeEnum(name)
        DeepSpeedConfig(copy.deepcopy(settings))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        place = _place_of(settings, place, problem.get("input")) or place
        raise ConfigError(
            f"{path}: DeepSpeed refuses {place} {shown(problem.get('input'))}: {problem['msg']}"
        ) from error
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: DeepSpeed refuses this configuration: {reason}") from error


def _place_of(content: Json, key: str, value: Any) -> str | None:
    """The dotted key of a section's ``key`` with that value: a message has the section's only."""
    for name, section in content.items():
        if isinstance(section, dict):
            if get(section, key) == value:
                return f"{name}.{key}"
            below = _place_of(section, key, value)
            if below is not None:
                return f"{name}.{below}"
    return None
