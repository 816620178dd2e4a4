"""Reading a request, and answering it as long as somebody waits for the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response

from megatron.inference.server.config import ServiceLimits
from megatron.inference.server.errors import RequestError

T = TypeVar("T")
_DEPTH = 64
"""Lists and objects inside each other."""
_SMALL = 2**16
"""Bytes of a body that is read however many others are."""
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
    """Counts the bytes of large bodies that are being read, so that many slow clients together do
    not take all memory. Small ones are always read: no more of them come than connections."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    def swap(self, before: int, after: int) -> None:
        """Counts a body that grows or goes. Raises RequestError, and counts nothing, if that is
        too much."""
        added = (after if after > _SMALL else 0) - (before if before > _SMALL else 0)
        if added > 0 and self._held + added > self._most:
            text = "too many large requests are being sent at once; try again later"
            raise RequestError(text, 503, code="busy", retry_after=1, close=True)
        self._held += added


async def read_object(request: Request, limits: ServiceLimits, held: HeldBodies) -> dict[str, Any]:
    """The JSON object that is a request's body. Raises RequestError if it is not one, too long or
    too deep, or does not come in time."""
    body = await _read_body(request, limits, held)
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError("the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > _DEPTH and _too_deep(found):
        raise RequestError(f"the body has more than {_DEPTH} lists and objects inside each other")
    return found


async def _read_body(request: Request, limits: ServiceLimits, held: HeldBodies) -> bytes:
    body = bytearray()
    try:
        await _fill(body, request, limits, held)
        return bytes(body)
    finally:
        held.swap(len(body), 0)


async def _fill(body: bytearray, request: Request, limits: ServiceLimits, held: HeldBodies) -> None:
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
            held.swap(len(body), 0)
            body.clear()
        else:
            held.swap(len(body), len(body) + len(piece))
            body += piece
    if too_long:
        text = f"the body is longer than {most:,} bytes (--max-request-bytes)"
        raise RequestError(text, 413, close=True)


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
