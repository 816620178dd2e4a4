"""Fields of a JSON object, each of which is checked when it is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.apps.generation.server.errors import RequestError
from megatron.config.flags import nearest


def is_integer(value: Any) -> bool:
    """Whether JSON's number is a whole one; true and false are not."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """Whether it is a number of any kind; true and false are not."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


class Fields:
    """The fields of a request. A field that is null is as if it were not there. All that take one
    raise RequestError, which names it, if its value is wrong."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """``where`` precedes the names in messages."""
        self._values, self._where = values, where
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """A value of any type, None if it is not there."""
        self._known.add(name)
        return self._values.get(name)

    def fault(self, name: str, what: str) -> RequestError:
        """The error of a field that ``what`` is said of."""
        return RequestError(f"{self._where}{name} {what}", param=f"{self._where}{name}")

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.take(name)
        if value is None or (is_number(value) and low <= value <= high):
            return value
        raise self.fault(name, f"must be a number from {low:g} to {high:g}")

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self.take(name)
        right = is_integer(value) and low <= value and (high is None or value <= high)
        if value is None or right:
            return value
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise self.fault(name, f"must be an integer, {bounds}")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise self.fault(name, "must be true or false")

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise self.fault(name, "must be a string")

    def object(self, name: str) -> Mapping[str, Any] | None:
        value = self.take(name)
        if value is None or isinstance(value, dict):
            return value
        raise self.fault(name, "must be an object")

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """Of a string or a list of strings, none of them empty."""
        value = self.take(name)
        found = [] if value is None else [value] if isinstance(value, str) else value
        if isinstance(found, list) and len(found) > most:
            raise self.fault(name, f"has {len(found):,} strings; at most {most} are possible")
        if not isinstance(found, list) or not all(isinstance(t, str) and t for t in found):
            raise self.fault(name, "must be a string or a list of strings, none of them empty")
        size = max(map(len, found), default=0)
        if size > longest:
            what = f"has a string of {size:,} characters; at most {longest:,} are possible"
            raise self.fault(name, what)
        return tuple(found)

    def ignore(self, *names: str) -> None:
        """Fields that say nothing about the answer."""
        self._known.update(names)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Fields that are not supported, with what to say of each; those that are null, false or
        empty ask for nothing."""
        for name, reason in reasons.items():
            if self.take(name) not in (None, False, [], {}, ""):
                raise self.fault(name, reason)

    def end(self, names: Iterable[str] = ()) -> None:
        """Raises RequestError if there is a field that nobody has taken. ``names``: further ones
        that are known."""
        known = self._known.union(names)
        for name in self._values:
            if name not in known:
                hint = nearest(name, known, "; did you mean {}?")
                raise self.fault(name[:100], f"is not a field of this request{hint}")
