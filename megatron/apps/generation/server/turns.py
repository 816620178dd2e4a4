"""Turns of requests at the work on their texts: parsing, chat templates, splitting into tokens."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron.apps.generation.server.exchange import SMALL_BODY, RequestError

T = TypeVar("T")
_TINY_BODY = 2**12
_MOST_OVERDUE = 4  # threads of a lane that may still work on a text whose time is over


class Lane:
    """Lets one request work at a time, each for at most ``seconds`` on a text. Clients take turns,
    each with the oldest of its requests, so that many requests of one client do not delay
    another's. For use in one event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.overdue = 0
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, client: str) -> None:
        """Waits for a turn, which ends with :meth:`leave`."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same time
                self.leave()
            raise

    def leave(self) -> None:
        """Passes the turn to another client's oldest request that still waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            requests = deque(turn for turn in self._waiting.pop(client) if not turn.done())
            if requests:
                requests.popleft().set_result(None)
                if requests:
                    self._waiting[client] = requests  # after those of the others
                return
        self._is_taken = False

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that no request waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RequestTurn:
    """One request's turn, as an asynchronous context manager."""

    def __init__(self, lane: Lane, client: str) -> None:
        self._lane, self._client = lane, client
        self._working: asyncio.Future[Any] | None = None
        self._end = 0.0

    async def __aenter__(self) -> RequestTurn:
        await self._lane.take(self._client)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._working is None or self._working.done():
            self._lane.leave()
        else:
            self._lane.background(self._leave_later(self._working))

    async def work(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of work on a text, in a thread that does not delay the end of the process.
        Raises RequestError if it takes too long."""
        loop, seconds = asyncio.get_running_loop(), self._lane.seconds
        self._end = loop.time() + seconds
        self._working = working = loop.create_future()

        def fail(error: BaseException) -> None:
            working.set_exception(error)
            working.exception()  # treated as seen, if the client has left

        def run() -> None:
            put: Callable[[Any], None] = working.set_result
            try:
                value: Any = work(*arguments)
            except BaseException as error:  # also of a library in Rust
                put, value = fail, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(put, value)

        threading.Thread(target=run, name="texts", daemon=True).start()
        await asyncio.wait({working}, timeout=seconds)
        if working.done():
            return working.result()
        text = f"the text takes more than {seconds:g} seconds to be split into tokens"
        raise RequestError(f"{text}; send less at once", code="text_takes_too_long")

    async def _leave_later(self, working: asyncio.Future[Any]) -> None:
        """Leaves when the thread, which cannot be ended, has ended, or else when its time is over
        and few others are overdue."""
        lane = self._lane
        await asyncio.wait({working}, timeout=self._end - asyncio.get_running_loop().time())
        if working.done() or lane.overdue == _MOST_OVERDUE:
            await asyncio.wait({working})
            lane.leave()
            return
        lane.overdue += 1
        lane.leave()
        await asyncio.wait({working})
        lane.overdue -= 1


class Turns:
    """Lanes by the size of a request, so that small ones do not wait for the texts of large
    ones."""

    def __init__(self, seconds: float) -> None:
        self._lanes = {size: Lane(seconds) for size in (_TINY_BODY, SMALL_BODY, math.inf)}

    def of(self, client: str, size: int) -> RequestTurn:
        """The turn of a client's request whose body has ``size`` bytes."""
        return RequestTurn(next(lane for most, lane in self._lanes.items() if size <= most), client)
