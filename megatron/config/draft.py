"""A configuration under construction, and the checks that many of its values share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.config.flags import ConfigError


@dataclass
class Draft:
    """Values of a configuration under construction.

    Attributes:
        values: value of each field.
        origins: where each value came from.
        flags: the flag of each field, for messages.
        notes: lines for the user.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    flags: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def given(self, name: str) -> bool:
        """Whether the value is no default."""
        return self.origins[name] != "default"

    def put(self, name: str, value: Any, how: str) -> None:
        """Sets a derived value."""
        self.values[name] = value
        self.origins[name] = f"derived: {how}"

    def fill(self, name: str, value: Any, how: str) -> None:
        """Sets a derived value if there is none yet."""
        if self.values[name] is None:
            self.put(name, value, how)

    def require(self, *names: str) -> None:
        """Refuses a configuration that lacks one of the values."""
        missing = [self.flags[name] for name in names if self.values[name] is None]
        if missing:
            raise ConfigError(f"missing {', '.join(missing)}")

    def show(self, name: str) -> str:
        """A value for a message: flag, value and where it came from."""
        origin = self.origins[name]
        flag = self.flags[name]
        place = "" if origin == f"flag {flag}" else f" ({origin})"
        return f"{flag} {self.values[name]}{place}"

    def check(self, condition: bool, message: str) -> None:
        """Raises ConfigError with ``message`` unless the condition holds."""
        if not condition:
            raise ConfigError(message)


def positive(draft: Draft, *names: str) -> None:
    """Refuses values of these fields that are not above zero; None is none."""
    for name in names:
        value = draft[name]
        draft.check(value is None or value > 0, f"{draft.show(name)} must be positive")


def not_negative(draft: Draft, *names: str) -> None:
    """Refuses values of these fields below zero; None is none."""
    for name in names:
        value = draft[name]
        draft.check(value is None or value >= 0, f"{draft.show(name)} must not be negative")


def divides(draft: Draft, divisor: str, whole: str) -> None:
    """Refuses a value that does not divide the other."""
    draft.check(
        draft[whole] % draft[divisor] == 0,
        f"{draft.show(divisor)} must divide {draft.show(whole)}",
    )
