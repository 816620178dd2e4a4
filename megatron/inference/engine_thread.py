"""Runs a generation engine in a thread of its own, for programs with an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

from megatron.inference.engine import EngineStats, GenerationEngine
from megatron.inference.request import GenerationRequest, Update


class EngineStopped(RuntimeError):
    """The engine takes no requests: it is being drained, or has failed."""


class EngineThread:
    """The thread that steps an engine; nobody else may use the engine from then on."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine

    @property
    def failed(self) -> BaseException | None:
        """What ended the thread, other than `drain` and `close`."""
        raise NotImplementedError

    @property
    def stats(self) -> EngineStats:
        """The engine's, as of its last step."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts the thread."""
        raise NotImplementedError

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Update]:
        """What a request gets, as it comes; the last update has ``finish``. Whoever stops
        iterating cancels it. The first ``anext`` raises ValueError if the request can never run,
        QueueFull if too many wait, EngineStopped; a later one what made it fail."""
        raise NotImplementedError
        yield

    async def drain(self, timeout: float) -> bool:
        """Takes no more requests, waits until the others have ended, cancels those that have not
        after ``timeout`` seconds, and ends the thread. Returns whether all ended by themselves."""
        raise NotImplementedError

    def close(self) -> None:
        """Cancels all requests and waits for the thread to end."""
        raise NotImplementedError
