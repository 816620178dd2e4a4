"""An object within a JSON file, read by keys; what is wrong is named by its dotted path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.flags import ConfigError
from megatron.util.nearest import nearest


class Section:
    """An object of a JSON file.

    Args:
        values: what is in it.
        path: where it stands, such as ``data_efficiency.data_sampling``.

    Raises:
        ConfigError: ``values`` is no object. So do all methods where a value is not what they read.
    """

    def __init__(self, values: Any, path: str) -> None:
        self.path = path
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is {_show(values)}; it must be an object")
        self.values: Mapping[str, Any] = values

    @classmethod
    def parse(cls, text: str, path: str) -> Section:
        """The object that a text holds."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: {text!r} is no JSON: {error}") from None
        return cls(values, path)

    def only(self, *keys: str) -> None:
        """Refuses other keys than these."""
        for key in self.values:
            if key not in keys:
                hint = nearest(key, keys, "; the nearest known key is {}")
                raise ConfigError(f"{self.path} has no key {key}{hint}")

    def section(self, key: str) -> Section:
        """An object in it, empty where there is none."""
        return Section(self.values.get(key, {}), f"{self.path}.{key}")

    @property
    def enabled(self) -> bool:
        """The value of ``enabled``, false without one."""
        value = self.values.get("enabled", False)
        if not isinstance(value, bool):
            raise self.wrong("enabled", "true or false")
        return value

    def choice(self, key: str, *choices: str, default: str | None = None) -> str:
        """One of some words."""
        value = self.values.get(key, default)
        if value not in choices:
            raise self.wrong(key, " or ".join(choices))
        return str(value)

    def text(self, key: str, what: str) -> str:
        """A string; ``what`` says which, for the message."""
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, what)
        return value

    def whole(self, key: str, least: int = 1, default: int | None = None) -> int:
        """A whole number of at least ``least``."""
        value = self.values.get(key, default)
        if type(value) is not int or value < least:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.wrong(key, "a positive number")
        return float(value)

    def rising(self, key: str) -> tuple[int, ...]:
        """A list of rising positive whole numbers."""
        values = self.values.get(key)
        if not _rises(values):
            raise self.wrong(key, "a list of rising positive whole numbers")
        return tuple(values)  # type: ignore[arg-type]

    def wrong(self, key: str, right: str) -> ConfigError:
        """What to raise where a value must be something else."""
        value = self.values.get(key)
        return ConfigError(f"{self.path}.{key} is {_show(value)}; it must be {right}")


def _rises(values: Any) -> bool:
    if not isinstance(values, Sequence) or not values or any(type(v) is not int for v in values):
        return False
    return values[0] > 0 and all(a < b for a, b in zip(values, values[1:], strict=False))


def _show(value: Any) -> str:
    return "missing" if value is None else json.dumps(value)
