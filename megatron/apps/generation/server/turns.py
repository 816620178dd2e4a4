"""Fair queueing of the text processing of requests: parsing, chat templates and tokenization."""

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
# maximum number of a lane's threads that may run on after their time limit without blocking it
_MOST_OVERDUE = 4


class Lane:
    """Fair queue that lets one request at a time process its texts, for at most ``seconds``.
    Clients are served round-robin, each with its oldest request, so that many requests of one
    client do not delay those of others. For use in a single event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.overdue = 0
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, client: str) -> None:
        """Wait for a turn, which ends with :meth:`leave`."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was granted at the same time
                self.leave()
            raise

    def leave(self) -> None:
        """Pass the turn to the oldest waiting request of the next client."""
        while self._waiting:
            client = next(iter(self._waiting))
            requests = deque(turn for turn in self._waiting.pop(client) if not turn.done())
            if requests:
                requests.popleft().set_result(None)
                if requests:
                    self._waiting[client] = requests  # move the client to the end
                return
        self._is_taken = False

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that no request waits for, and keep a reference to its task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RequestTurn:
    """Turn of one request, as an asynchronous context manager."""

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
        """Return the result of ``work``. It runs in a daemon thread, so that it cannot delay the
        exit of the process. Raises RequestError if it takes too long."""
        loop, seconds = asyncio.get_running_loop(), self._lane.seconds
        self._end = loop.time() + seconds
        self._working = working = loop.create_future()

        def fail(error: BaseException) -> None:
            working.set_exception(error)
            working.exception()  # mark the exception as retrieved, in case the client has left

        def run() -> None:
            put: Callable[[Any], None] = working.set_result
            try:
                value: Any = work(*arguments)
            except BaseException as error:  # also a panic in a Rust library
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
        """Leave the lane once the thread ends, since a thread cannot be stopped. If few other
        threads are overdue, leave already at the time limit."""
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
    """Lanes by request size, so that small requests do not wait for the texts of large requests."""

    def __init__(self, seconds: float) -> None:
        self._lanes = {size: Lane(seconds) for size in (_TINY_BODY, SMALL_BODY, math.inf)}

    def of(self, client: str, size: int) -> RequestTurn:
        """Return the turn of a client's request with a body of ``size`` bytes."""
        return RequestTurn(next(lane for most, lane in self._lanes.items() if size <= most), client)
