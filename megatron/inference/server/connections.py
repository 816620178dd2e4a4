"""Connections that are closed when the client is silent or reads nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_CHECKS = 8
"""Checks of a connection within each of its two times."""


def bounded_connection(read_seconds: float, write_seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol with the two times of :class:`BoundedConnection`."""
    times = {"read_seconds": read_seconds, "write_seconds": write_seconds}
    return type("BoundedConnection", (BoundedConnection,), times)


class BoundedConnection(H11Protocol):
    """Closes itself when no request comes, or its head does not end, within ``read_seconds``, and
    when nothing of an answer is read for ``write_seconds``. What uvicorn calls closing waits
    for the other side to read."""

    read_seconds = 30.0
    write_seconds = 30.0

    def connection_made(self, transport: Any) -> None:
        """Starts the checks."""
        super().connection_made(transport)
        self._idle_since = self._read_since = self.loop.time()
        self._unread = 0
        self._timer: asyncio.TimerHandle | None = None
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

    def _check(self) -> None:
        now = self.loop.time()
        if not self._idle:
            self._idle_since = now
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread < self._unread:
            self._read_since = now
        self._unread = unread
        if (
            now - self._idle_since >= self.read_seconds
            or now - self._read_since >= self.write_seconds
        ):
            self.transport.abort()
            return
        pause = min(self.read_seconds, self.write_seconds) / _CHECKS
        self._timer = self.loop.call_later(pause, self._check)
