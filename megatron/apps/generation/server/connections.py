"""Connections that are closed when there are too many, when the client is silent or reads
nothing."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.util.errors import RareLog

_CHECKS = 8
"""Checks of a connection within each of its two times."""
_UNREAD = 2**26
"""Bytes of answers of all clients that may wait to be read."""
_UNREAD_OF_ONE = 2**16
"""Bytes of a client that are never too many."""
_OTHER_DESCRIPTORS = 128
"""Kept free: for the processes of chat templates and constraints, for files, and for connections
that are refused and not closed yet."""
_OVER = 32
"""Connections above the limit that still get an answer, status 503."""


def most_connections() -> int:
    """Connections for which this process has file descriptors, besides those it has now."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 2**31
    folder = Path("/dev/fd")  # of Linux and macOS
    used = len(list(folder.iterdir())) if folder.is_dir() else 0
    free = most - used
    return max(1, free - _OTHER_DESCRIPTORS, free // 4)


class BoundedConnection(H11Protocol):
    """Closes itself when no request comes, or its head does not end, within ``read_seconds``, and
    when nothing of an answer is read for ``write_seconds``, or its client is the one that has most
    to read while all have too much. What uvicorn calls closing waits for the other side to read.

    With ``limit_concurrency`` and more of them the newest gets status 503 and is soon closed, or at
    once if there are many more: the process must not run out of file descriptors."""

    read_seconds = 30.0
    write_seconds = 30.0
    rare_log: RareLog

    def connection_made(self, transport: Any) -> None:
        """Starts the checks."""
        super().connection_made(transport)
        self._idle_since = self._read_since = self.loop.time()
        self._unread = 0
        self._timer: asyncio.TimerHandle | None = None
        over = len(self.connections) - (self.limit_concurrency or 0)
        if over >= 0:
            line = f"{len(self.connections) - 1:,} clients are connected: others are refused"
            self.rare_log.say("connections", line)
        if over >= _OVER:
            transport.abort()
            return
        self._is_over = over >= 0
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the checks."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _idle(self) -> bool:
        """Whether no answer is owed: no request has begun, or it was answered before its end."""
        return self.conn.their_state is h11.IDLE or (
            self.cycle is not None and self.cycle.response_complete
        )

    def _has_most_to_read(self) -> bool:
        unread = [one.transport.get_write_buffer_size() for one in self.connections]
        return sum(unread) > _UNREAD and self._unread == max(unread)

    def _check(self) -> None:
        now = self.loop.time()
        if not self._idle:
            self._idle_since = now
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread < self._unread:
            self._read_since = now
        self._unread = unread
        idle_seconds = min(self.read_seconds, 1.0) if self._is_over else self.read_seconds
        if (
            now - self._idle_since >= idle_seconds
            or now - self._read_since >= self.write_seconds
            or (unread > _UNREAD_OF_ONE and self._has_most_to_read())
        ):
            self.transport.abort()
            return
        pause = min(idle_seconds, self.write_seconds) / _CHECKS
        self._timer = self.loop.call_later(pause, self._check)
