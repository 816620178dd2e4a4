"""HTTP request handling: read a body and its fields, refuse a request, and answer it while its
client is connected."""

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
"""Maximum bytes of a small body. Small bodies do not wait for larger ones, and do not count towards
the limit on held bytes."""
_DEPTH = 64  # maximum nesting of lists and objects
# Maximum bytes to read and discard of a body that is too long, as a multiple of the limit. Most
# clients read a response only after they have sent their whole body.
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
    """Raised if the client disconnects before it is answered."""


class RequestError(Exception):
    """Raised to refuse a request. ``status`` is the HTTP status of the response.

    Attributes:
        param: name of the invalid field.
        code: machine-readable error code.
        retry_after: seconds after which another attempt may succeed.
        close: whether to close the connection after the response.
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
        """Return the response body: in Megatron's format for ``/api``, otherwise in OpenAI's."""
        return {"message": self.message} if path == "/api" else self.openai()

    def openai(self) -> dict[str, Any]:
        """Return the error in OpenAI's format, which is also sent at the end of a failed stream."""
        default = "server_error" if self.status >= 500 else _ERROR_TYPES[400]
        kind = _ERROR_TYPES.get(self.status, default)
        named = {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": kind, **named}}


class JSON(Response):
    """JSON response in UTF-8. NaN and infinity become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class HeldBodies:
    """Limit on the total bytes of large request bodies that are not tokenized yet. Small bodies are
    always accepted, because the connection limit bounds their number."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    def swap(self, before: int, after: int) -> None:
        """Change the counted size of a body from ``before`` to ``after`` bytes. Raises
        RequestError, and changes nothing, if the total would exceed the limit."""
        added = (after if after > SMALL_BODY else 0) - (before if before > SMALL_BODY else 0)
        if added > 0 and self._held + added > self._most:
            text = "too many large requests are being sent or wait; try again later"
            raise RequestError(text, 503, code="busy", retry_after=1, close=True)
        self._held += added


class Body:
    """Request body. Its size counts towards the limit of ``all_bodies`` until the ``with`` block
    ends."""

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
        """Read the body. Raises RequestError if it is too long or too slow, or if the total size of
        all bodies is too large. Raises ClientGone if the client disconnects."""
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
        """Parse the body as a JSON object, and release its bytes. Raises RequestError if it is not
        a JSON object, or is nested too deeply."""
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
    """Return the result of ``work``. If the client disconnects, cancel it and raise ClientGone."""

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
    """Return whether a JSON value is an integer. false and true are not."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number. false and true are not."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


class Fields:
    """Fields of a JSON object, each checked when it is read. A null field counts as missing.
    Methods raise RequestError, naming the field, if its value is invalid."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """``where`` is a prefix for field names in messages."""
        self._values, self._where = values, where
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """Return a field's value of any type, or None if it is missing."""
        self._known.add(name)
        return self._values.get(name)

    def fault(self, name: str, what: str) -> RequestError:
        """Return an error whose message is the field's name followed by ``what``."""
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
        """Return the non-empty strings of a field that contains a string or a list of strings."""
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
        """Accept fields that do not affect the answer."""
        self._known.update(names)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Check that unsupported fields are null, false or empty. Raises RequestError with the
        reason given for the field otherwise."""
        for name, reason in reasons.items():
            if self.take(name) not in (None, False, [], {}, ""):
                raise self.fault(name, reason)

    def end(self, names: Iterable[str] = ()) -> None:
        """Raise RequestError for the first field that has not been read and is not in ``names``."""
        known = self._known.union(names)
        for name in self._values:
            if name not in known:
                hint = nearest(name, known, "; did you mean {}?")
                raise self.fault(name[:100], f"is not a field of this request{hint}")
