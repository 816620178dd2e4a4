"""Reading of a user's DeepSpeed JSON file. Errors name the keys that DeepSpeed or a feature
rejects."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.config.features import features
from megatron.engine.deepspeed_json import Json, get, section_text
from megatron.util.json_text import parse_json


def read_json(path: str) -> Json:
    """Read a DeepSpeed JSON file. Raises ConfigError if the file is missing or not a JSON object,
    or if a feature refuses it."""
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
        for feature in features().values():
            feature.json_file(text, None, path)
        raise ConfigError(str(error)) from None
    if not isinstance(content, dict):
        raise ConfigError(f"--deepspeed_config {path}: expected a JSON object")
    for feature in features().values():
        content = feature.json_file(text, content, path)
    _check_own_sections(content, path)
    return content


def shown(value: Any) -> str:
    """Return a value of a JSON file as text for messages, shortened to about 200 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) < 200 else f"{text[:200]}..."


def _check_own_sections(content: Json, path: str) -> None:
    for feature in features().values():
        given = {key: content.get(key, "auto") for key in feature.json_sections}
        texts = {key: section_text(value) for key, value in given.items() if value != "auto"}
        try:
            feature.check_json(texts)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def check_settings(settings: Json, path: str) -> None:
    """Check settings that :func:`for_engine` returned. Raises ConfigError, which names the key and
    the JSON file ``path``, if DeepSpeed refuses them."""
    from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
    from pydantic import ValidationError

    # DeepSpeed compares train_batch_size with the number of processes.
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
    """Return the dotted path of ``key`` with ``value``, whose section DeepSpeed's error omits."""
    for name, section in content.items():
        if isinstance(section, dict):
            if get(section, key) == value:
                return f"{name}.{key}"
            below = _place_of(section, key, value)
            if below is not None:
                return f"{name}.{below}"
    return None
