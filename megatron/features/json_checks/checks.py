"""Checks of a DeepSpeed JSON file for keys and values that DeepSpeed or this trainer would misread,
ignore, or fail on only later."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from megatron.config import ConfigError
from megatron.config.flags import nearest
from megatron.engine.deepspeed_file import shown
from megatron.engine.deepspeed_json import (
    MAX_GRAD_NORM,
    PAIRS,
    REMOVED,
    TABLES,
    ZERO,
    Json,
    get,
    removed_keys,
)

_FIXED_OPTIMIZER_PARAMS: Json = {
    "adam_w_mode": True,
    "amsgrad": False,
    "bias_correction": True,
    "nesterov": False,
}
"""Optimizer parameters that this trainer cannot change. Other values would have no effect, so they
are errors."""


_IMPLEMENTATIONS = frozenset({"torch_adam", "fused", "foreach"})
"""Optimizer parameters that select a kernel. They are accepted, and do not affect results."""


_KNOWN_KEYS = frozenset(TABLES["known"])


_NEWER_KEYS = TABLES["newer"]


_REFUSED = TABLES["refused"]


_INSTEAD = TABLES["instead"]


_DEPRECATED = TABLES["deprecated"]


_VALUES = TABLES["values"]


_AUTOMATIC = TABLES["placeholders"]


_OFFLOAD = ("offload_optimizer", "offload_param")


_DEVICES = ("none", "cpu", "nvme")
"""Devices to which optimizer states and parameters can be offloaded."""


_SECTIONS = tuple(
    """tensorboard wandb csv_monitor comet comms_logger flops_profiler aio timers data_efficiency
    data_types""".split()
)
"""Keys whose values must be objects, in addition to the sections in :data:`PAIRS`."""


_LEVELS = "debug, info, warning, error or critical"


_LIBRARIES = {"wandb": "wandb", "comet": "comet_ml"}
"""Names of the packages that sections need, by section."""


_WRITES = ("tensorboard.output_path", "csv_monitor.output_path", "flops_profiler.output_file")


def file_notes(content: Json, path: str) -> list[str]:
    """Return notes for the user about the JSON at ``path``: keys that are dropped or have no
    effect, and every path or service to which it makes DeepSpeed write or send data. These matter
    because another person may have written the file."""
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


_NAMES = (
    r"(?:CONFIG_[A-Z_]+|LOG_INTERVAL|ZERO_STAGE|PRESCALE_GRAD|GBSIZE|MBSIZE|LTD_(?:ENABLED|MIN|MAX"
    r"|STEP)|CL_(?:ENABLED|CLUSTER_PATH|(?:1st|2nd)_[A-Z_]+)|DATA_EFFICIENCY_SEED"
    r"|DATA_SAMPLING_NUM_WORKERS|OFFLOAD_DEVICE|SP)"
)


_QUOTED = re.compile(rf'"({_NAMES})"')
"""Placeholder in the templates of Megatron-DeepSpeed's scripts, as a string in valid JSON."""


_BARE = re.compile(rf"[:,\[{{]\s*({_NAMES}\b|\$(?:\w+|\{{\w+\}})|[A-Z][A-Z0-9_]{{2,}}\b)")
"""Placeholder or shell variable outside of strings, which makes the file invalid JSON."""


_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"?')  # an unterminated string is scanned only once


def check_text(text: str, path: str) -> None:
    """Raise ConfigError if the text of a file that is not valid JSON has unfilled placeholders."""
    _refuse_placeholders(_STRING.sub('""', text), path, _BARE)


def checked(text: str, content: Json, path: str) -> Json:
    """Return a file's JSON object without unsupported sections that are disabled. Raises
    ConfigError, which names the key, if a key is unknown or unsupported, or if DeepSpeed would fail
    on a value."""
    _refuse_placeholders(text, path, _QUOTED)
    _check_keys(content, path)
    _check_removed(content, path)
    _check_sections(content, path)
    _check_values(content, path)
    _check_offload(content, path)
    _check_optimizer(content, path)
    # DeepSpeed may reject the key "enabled" in these sections, or act on them without checking it.
    return {key: value for key, value in content.items() if not _is_off(key, value)}


def _refuse_placeholders(text: str, path: str, pattern: re.Pattern[str]) -> None:
    """Raise ConfigError, with the line number, if a placeholder matches ``pattern``."""
    match = pattern.search(text)
    if match is None:
        return
    name, line = match[1], text.count("\n", 0, match.start(1)) + 1
    filled = "the script of this template replaces it by a value"
    if name in _AUTOMATIC:
        filled += f'; "auto" in its place is filled by the trainer: {_AUTOMATIC[name]}'
    raise ConfigError(f"{path}, line {line}: the placeholder {name} is not filled; {filled}")


def _check_keys(content: Json, path: str) -> None:
    """Raise ConfigError for top-level keys that are unknown, unsupported by the trainer, or newer
    than the installed DeepSpeed."""
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
    """Return whether ``value`` is an unsupported section that is disabled."""
    return key in _REFUSED and isinstance(value, dict) and value.get("enabled") is False


def _check_removed(content: Json, path: str) -> None:
    """Raise ConfigError if a key that DeepSpeed has removed is enabled or malformed."""
    for key, value in removed_keys(content):
        places = list(_switched_on(key, value, path))
        if places:
            raise ConfigError(
                f"{path}: {' and '.join(places)} {'is' if len(places) == 1 else 'are'} on, and "
                f"DeepSpeed removed {key} in {REMOVED[key]}: {_INSTEAD[key]}; remove the key, or "
                "switch it off"
            )


def _switched_on(key: str, value: Any, path: str) -> Iterator[str]:
    """Yield the keys that a removed key's ``value`` enables. Raises ConfigError if malformed."""
    if key == f"{ZERO}.mics_shard_size" and value is not None:
        if type(value) is not int:
            raise ConfigError(f"{path}: {key} is {shown(value)}; it must be an integer")
        if value > 0:
            yield f"{key} {value}"
    elif isinstance(value, dict) and key in ("sparse_attention", f"{ZERO}.zeropp_loco_param"):
        # These sections are enabled by any content, unless "enabled" is false.
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
    """Raise ConfigError if a section is a plain value where an object, or a list for the betas, is
    expected."""
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
    """Raise ConfigError for values on which DeepSpeed would fail in the middle of a run."""
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
