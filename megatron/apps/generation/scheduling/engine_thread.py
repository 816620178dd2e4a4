"""Run a generation engine in a separate thread, for programs with an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Hashable

import torch

from megatron.apps.generation.request import GenerationRequest, Update
from megatron.apps.generation.scheduling.engine import EngineStats, GenerationEngine, QueueFull
from megatron.apps.generation.scheduling.jobs import Job


class EngineStopped(RuntimeError):
    """Raised if the engine no longer accepts requests, because it is draining or failed."""


class _Stream:
    """A job, and the queue of its updates in its client's event loop."""

    def __init__(self, job: Job) -> None:
        self.job, self.ended = job, False
        self.loop = asyncio.get_running_loop()
        self.updates: asyncio.Queue[Update | EngineStopped] = asyncio.Queue()

    async def next(self) -> Update:
        """Return the next update. Raises the error that made the request or the engine fail."""
        update = await self.updates.get()
        if isinstance(update, EngineStopped):
            self.ended = True
            raise update
        self.ended = update.finish is not None
        if update.error is not None:
            raise update.error
        return update


_Told = list[tuple[_Stream, Update | EngineStopped]]


class EngineThread:
    """Thread that runs the steps of an engine. Once started, no other thread may run steps."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._torch_threads = torch.get_num_threads()
        # Guards the attributes below, which other threads also change.
        self._changed = threading.Condition()
        self._came: list[_Stream] = []
        self._left: list[_Stream] = []
        self._draining = self._closing = False
        self._failed: BaseException | None = None
        self._streams: dict[int, _Stream] = {}

    @property
    def failed(self) -> BaseException | None:
        """Error that ended the thread. None if it has not failed."""
        return self._failed

    @property
    def stats(self) -> EngineStats:
        """Snapshot of the engine's statistics, without the step in progress."""
        return self.engine.stats

    def start(self) -> None:
        self._thread.start()

    async def stream(
        self, request: GenerationRequest, source: tuple[Hashable, Hashable] = (None, None)
    ) -> AsyncGenerator[Update, None]:
        """Yield the updates of a request as they arrive. The last one has ``finish`` set.
        Closing the generator early cancels the request. The queue serves sources fairly (see
        `Job`). The first ``anext`` raises ValueError if the request can never run, QueueFull if
        too many are waiting, or EngineStopped. Every ``anext`` may raise the error that made the
        request fail."""
        if request.constraint is None:
            job = self.engine.job(request)
        else:  # compile in another thread, because it would delay other requests
            job = await asyncio.to_thread(self.engine.job, request)
        job.source = source
        stream = _Stream(job)
        with self._changed:
            if self._failed is not None:
                raise self._failure()
            if self._draining:
                raise EngineStopped("generation is being shut down: it takes no more requests")
            if len(self._came) >= self.engine.room:
                raise QueueFull(self.engine.limits)
            self._came.append(stream)
            self._changed.notify()
        try:
            while not stream.ended:
                yield await stream.next()
        finally:
            if not stream.ended:
                with self._changed:
                    self._left.append(stream)
                    self._changed.notify()

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests, wait up to ``timeout`` seconds for the accepted ones, cancel those
        that remain, and end the thread. Return False if requests were cancelled or the engine
        failed."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        await asyncio.to_thread(self._join, timeout)
        ended = not self._thread.is_alive() and self._failed is None
        await asyncio.to_thread(self.close)
        return ended

    def close(self) -> None:
        """Cancel all requests, and wait for the thread to end."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify()
        self._join(None)

    def _join(self, timeout: float | None) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _failure(self) -> EngineStopped:
        stopped = EngineStopped(f"generation has failed: {self._failed}")
        stopped.__cause__ = self._failed
        return stopped

    def _run(self) -> None:
        # The OpenMP thread count applies only to the thread that sets it.
        torch.set_num_threads(self._torch_threads)
        try:
            while self._receive():
                updates = self.engine.step()
                told: _Told = [(self._streams[update.number], update) for update in updates]
                for update in updates:
                    if update.finish is not None:
                        del self._streams[update.number]
                self._send(told)
        except BaseException as error:  # waiting clients must be notified of any error
            with self._changed:
                self._failed = error
                streams = [*self._streams.values(), *self._came]
            self._send([(stream, self._failure()) for stream in streams])

    def _receive(self) -> bool:
        """Wait for work, add new requests to the engine, and cancel abandoned ones. Return False
        once the engine is draining and all work is done."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._came or self._left or self._draining or self.engine.busy
            )
            came, self._came = self._came, []
            left, self._left = self._left, []
            if self._closing:
                left = [*self._streams.values(), *came]
            for stream in came:
                self._streams[self.engine.add(stream.job)] = stream
        for stream in left:
            self.engine.cancel(stream.job.number)
        return self.engine.busy or not self._draining

    def _send(self, told: _Told) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, _Told] = {}
        for stream, update in told:
            by_loop.setdefault(stream.loop, []).append((stream, update))
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, pairs)
            except RuntimeError:  # the loop is closed and its streams are abandoned
                self._left += [stream for stream, _ in pairs]


def _put(told: _Told) -> None:
    for stream, update in told:
        stream.updates.put_nowait(update)
