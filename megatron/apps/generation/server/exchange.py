"""Reading a request, and answering it as long as somebody waits for the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response

from megatron.apps.generation.server.config import ServiceLimits
from megatron.apps.generation.server.errors import RequestError
from megatron.apps.generation.server.turns import SMALL_BODY

T = TypeVar("T")
_DEPTH = 64
"""Lists and objects inside each other."""
_DISCARDED = 16
"""What is read of a body that is too long, and thrown away, in longest bodies: most clients read an
answer only when they have sent all."""


class ClientGone(Exception):
    """Nobody waits for the answer."""


class JSON(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """In UTF-8; what is not a number becomes null."""
        return orjson.dumps(content)


class HeldBodies:
    """Counts the bytes of large bodies from the first one until their texts are tokens, so that
    many clients together do not take all memory. Small ones are always read: no more of them come
    than connections."""

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

    def __init__(self, held: HeldBodies) -> None:
        self._held, self._content = held, bytearray()
        self.size = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def add(self, piece: bytes) -> None:
        """Raises RequestError if all bodies together are too large."""
        self._held.swap(self.size, self.size + len(piece))
        self.size += len(piece)
        self._content += piece

    def clear(self) -> None:
        """Forgets what has come."""
        self._held.swap(self.size, 0)
        self.size, self._content = 0, bytearray()

    async def read(self, request: Request, limits: ServiceLimits) -> None:
        """Raises RequestError if it is too long, or does not come in time; ClientGone."""
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
                self.clear()
            else:
                self.add(piece)
        if too_long:
            text = f"the body is longer than {most:,} bytes (--max-request-bytes)"
            raise RequestError(text, 413, close=True)

    def parsed(self) -> dict[str, Any]:
        """The JSON object that it is; its bytes are given up. Raises RequestError if it is not one,
        or too deep."""
        content, self._content = self._content, bytearray()
        try:
            found = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise RequestError("the body must be a JSON object")
        if content.count(b"[") + content.count(b"{") > _DEPTH and _too_deep(found):
            text = f"the body has more than {_DEPTH} lists and objects inside each other"
            raise RequestError(text)
        return found


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH + 1):
        children: list[Any] = []
        for item in level:
            inside = item.values() if isinstance(item, dict) else item
            children += [child for child in inside if isinstance(child, dict | list)]
        if not children:
            return False
        level = children
    return True


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away: raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
