"""Reading a request and its fields, refusing it, and answering while its client waits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response

from megatron.apps.generation.server.config import ServiceLimits
from megatron.config.flags import nearest

T = TypeVar("T")
SMALL_BODY = 2**16
"""Bytes up to which a body waits for no larger one, and is not counted."""
_DEPTH = 64  # lists and objects inside each other
# The bytes that are read and discarded of a body that is too long, in longest bodies: most clients
# read an answer only when they have sent all.
_DISCARDED = 16
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ClientGone(Exception):
    """The client has left before its answer."""


class RequestError(Exception):
    """A refused request, with the HTTP ``status`` of the answer.

    Attributes:
        param: the invalid field.
        code: a machine-readable word.
        retry_after: seconds after which another attempt may succeed.
        close: True if the connection cannot be reused.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after, self.close = retry_after, close

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.close:
            headers["Connection"] = "close"
        return headers

    def body(self, path: str) -> dict[str, Any]:
        """Megatron's form for ``/api``, OpenAI's for all other paths."""
        return {"message": self.message} if path == "/api" else self.openai()

    def openai(self) -> dict[str, Any]:
        """OpenAI's form, which also ends a stream."""
        default = "server_error" if self.status >= 500 else _ERROR_TYPES[400]
        kind = _ERROR_TYPES.get(self.status, default)
        named = {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": kind, **named}}


class JSON(Response):
    """A JSON body in UTF-8; floats that are not finite become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class HeldBodies:
    """A bound on the total bytes of large request bodies, until their texts are tokenized. Small
    bodies are always read: connections bound their number."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    def swap(self, before: int, after: int) -> None:
        """Counts a body that grows or goes. Raises RequestError, and counts nothing, if that is
        too much."""
        added = (after if after > SMALL_BODY else 0) - (before if before > SMALL_BODY else 0)
        if added > 0 and self._held + added > self._most:
            text = "too many large requests are being sent or wait; try again later"
            raise RequestError(text, 503, code="busy", retry_after=1, close=True)
        self._held += added


class Body:
    """The body of a request; a context manager, at whose end it is counted no more."""

    def __init__(self, all_bodies: HeldBodies) -> None:
        self._held, self._content = all_bodies, bytearray()
        self.size = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def _clear(self) -> None:
        self._held.swap(self.size, 0)
        self.size, self._content = 0, bytearray()

    async def read(self, request: Request, limits: ServiceLimits) -> None:
        """Raises RequestError if the body is too long, or does not come in time, or all bodies
        together are too large; ClientGone."""
        most = limits.request_bytes
        declared = request.headers.get("content-length", "")
        too_long = declared.isdecimal() and int(declared) > most
        expects = request.headers.get("expect", "").lower() == "100-continue"
        size = 0
        end, more = time.monotonic() + limits.read_seconds, not (too_long and expects)
        while more and size <= most * _DISCARDED:
            try:
                message = await asyncio.wait_for(request.receive(), end - time.monotonic())
            except asyncio.TimeoutError:
                text = f"the body did not arrive within {limits.read_seconds:g} seconds"
                raise RequestError(text, 408, close=True) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece, more = message.get("body", b""), message.get("more_body", False)
            size += len(piece)
            too_long = too_long or size > most
            if too_long:
                self._clear()
            else:
                self._held.swap(self.size, size)
                self.size = size
                self._content += piece
        if too_long:
            text = f"the body is longer than {most:,} bytes (--max-request-bytes)"
            raise RequestError(text, 413, close=True)

    def parsed(self) -> dict[str, Any]:
        """The JSON object of the body, whose bytes are released. Raises RequestError for other
        bodies and deeper objects."""
        content, self._content = self._content, bytearray()
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise RequestError("the body must be a JSON object")
        if content.count(b"[") + content.count(b"{") > _DEPTH and _too_deep(value):
            text = f"the body has more than {_DEPTH} lists and objects inside each other"
            raise RequestError(text)
        return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH + 1):
        values = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for inside in values for child in inside if isinstance(child, dict | list)]
        if not level:
            return False
    return True


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away: raises ClientGone."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def is_integer(value: Any) -> bool:
    """True for JSON's whole numbers; false and true are not numbers."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """True for JSON's finite numbers; false and true are not numbers."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


class Fields:
    """The fields of a JSON object, each checked when it is taken; null is as a missing field. All
    methods raise RequestError, which names the field, if its value is wrong."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """``where`` precedes the names in messages."""
        self._values, self._where = values, where
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """A value of any type; None for a missing one."""
        self._known.add(name)
        return self._values.get(name)

    def fault(self, name: str, what: str) -> RequestError:
        """The error that says ``what`` of a field."""
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

    def _typed(self, name: str, kind: type, what: str) -> Any:
        value = self.take(name)
        if value is None or isinstance(value, kind):
            return value
        raise self.fault(name, f"must be {what}")

    def flag(self, name: str) -> bool:
        return bool(self._typed(name, bool, "true or false"))

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "a string")

    def object(self, name: str) -> Mapping[str, Any] | None:
        return self._typed(name, dict, "an object")

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """The texts of a string or a list of strings, none of them empty."""
        value = self.take(name)
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if isinstance(texts, list) and len(texts) > most:
            raise self.fault(name, f"has {len(texts):,} strings; at most {most} are possible")
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            raise self.fault(name, "must be a string or a list of strings, none of them empty")
        size = max(map(len, texts), default=0)
        if size > longest:
            what = f"has a string of {size:,} characters; at most {longest:,} are possible"
            raise self.fault(name, what)
        return tuple(texts)

    def ignore(self, *names: str) -> None:
        """Accepts fields that do not change the answer."""
        self._known.update(names)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuses unsupported fields, with a reason each, unless null, false or empty."""
        for name, reason in reasons.items():
            if self.take(name) not in (None, False, [], {}, ""):
                raise self.fault(name, reason)

    def end(self, names: Iterable[str] = ()) -> None:
        """Raises RequestError for a field that was not taken and is not one of ``names``."""
        known = self._known.union(names)
        for name in self._values:
            if name not in known:
                hint = nearest(name, known, "; did you mean {}?")
                raise self.fault(name[:100], f"is not a field of this request{hint}")
