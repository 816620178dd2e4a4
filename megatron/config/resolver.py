"""Flags on their way to a configuration: where each value came from, for messages and users."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from megatron.config.flags import ConfigError, Setting, Settings, flag_of

T = TypeVar("T")


class ConfigResolver:
    """What is known of every flag while a configuration is resolved.

    Values are computed with as attributes of the flag classes; here they are for messages and for
    ``--explain-config``, together with those that were derived.

    Args:
        classes: the flag classes.
        settings: what is given, by field name.

    Attributes:
        values: value of each field.
        origins: where each value came from.
        notes: lines for the user.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    def __init__(self, classes: Sequence[type], settings: Settings) -> None:
        fields = [field for cls in classes for field in dataclasses.fields(cls)]
        self._flags = {field.name: flag_of(field) for field in fields}
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        for field in fields:
            origin = "derived" if field.metadata.get("internal") else "default"
            setting = settings.get(field.name, Setting(field.default, origin))
            self.values[field.name], self.origins[field.name] = setting.value, setting.origin
        for field in fields:
            bounds, value = field.metadata.get("bounds"), self.values[field.name]
            if bounds is not None and value is not None:
                self.check(bounds.hold(value), f"{self.show(field.name)} {bounds.rule}")

    def given(self, name: str) -> bool:
        """Whether the value is no default."""
        return self.origins[name] != "default"

    def put(self, name: str, value: T, how: str) -> T:
        """A derived value, which is noted."""
        self.values[name], self.origins[name] = value, f"derived: {how}"
        return value

    def fill(self, name: str, given: T | None, value: T, how: str) -> T:
        """What is given, or else a derived value, which is noted."""
        return self.put(name, value, how) if given is None else given

    def require(self, **given: T | None) -> tuple[T, ...]:
        """The values by field name, in their order.

        Raises:
            ConfigError: some are not given.
        """
        missing = [self.flag(name) for name, value in given.items() if value is None]
        if missing:
            raise ConfigError(f"missing {', '.join(missing)}")
        return tuple(value for value in given.values() if value is not None)

    def flag(self, name: str) -> str:
        """The flag that sets a field."""
        return self._flags[name]

    def show(self, name: str) -> str:
        """A value for a message: flag, value and where it came from."""
        origin, flag = self.origins[name], self.flag(name)
        place = "" if origin == f"flag {flag}" else f" ({origin})"
        return f"{flag} {self.values[name]}{place}"

    def check(self, condition: bool, message: str) -> None:
        """Raises ConfigError with ``message`` unless the condition holds."""
        if not condition:
            raise ConfigError(message)

    def check_divides(self, divisor: str, whole: str) -> None:
        """Refuses a value that does not divide the other."""
        self.check(
            self.values[whole] % self.values[divisor] == 0,
            f"{self.show(divisor)} must divide {self.show(whole)}",
        )


def shared(flags: Any, cls: type) -> dict[str, Any]:
    """The values of those flags that a resolved class takes as they are: its fields of that name.

    Args:
        flags: an instance of a flag class.
        cls: a class whose fields are all flags.
    """
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(cls)}
