"""HTTP server in a separate thread, with limits on the number and duration of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.config import ConfigError
from megatron.util.errors import RareLog

T = TypeVar("T")
_BACKLOG = 1024
_ACCEPTED = 16  # number of connections that asyncio accepts at a time, before it closes others
_CLOSING_SECONDS = 5  # seconds for clients to read their responses at shutdown
_CHECKS = 8  # number of timeout checks of a connection per timeout period
# maximum total bytes of responses that are buffered because clients have not read them
_UNREAD = 2**26
_UNREAD_OF_ONE = 2**16  # bytes that each client may leave unread in any case
# File descriptors to keep free: for the processes of chat templates and constraints, for files, and
# for refused connections that are not closed yet.
_OTHER_DESCRIPTORS = 128
_OVER = 32  # number of connections above the limit that are still answered with status 503


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the given address. Raises ConfigError if the address is in
    use or cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not an address here: {error.strerror}") from None
    listening = socket.socket(family, kind, protocol)
    # Otherwise the port of a server that has just ended would be blocked for a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        reason = {
            errno.EADDRINUSE: "another program listens there; choose another --port, or 0 for a "
            "free one",
            errno.EADDRNOTAVAIL: "this machine does not have the address",
            errno.EACCES: "ports below 1024 need rights that this user does not have; choose "
            "another",
        }.get(error.errno or 0, os.strerror(error.errno or 0))
        raise ConfigError(f"--host {host} --port {port}: {reason}") from None
    return listening


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections of a server. The server's flags describe the fields."""

    connections: int = 1024
    read_seconds: float = 30.0
    write_seconds: float = 30.0


class HTTPThread:
    """Thread that serves an application until :meth:`close` is called."""

    def __init__(
        self,
        app: Any,
        listening: socket.socket,
        limits: ConnectionLimits | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        limits = limits or ConnectionLimits()
        self._listening, self._rare_log = listening, RareLog(log)
        connections = min(limits.connections, most_connections())
        if connections < limits.connections:
            log(
                f"--max-connections {limits.connections:,}: {connections:,} clients at once, "
                "because this process may have no more files open (ulimit -n)"
            )
        bounds = {
            "read_seconds": limits.read_seconds,
            "write_seconds": limits.write_seconds,
            "rare_log": self._rare_log,
        }
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=type("Connection", (BoundedConnection,), bounds),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # uvicorn's count includes the connection to refuse
                limit_concurrency=connections + 1,
                backlog=_ACCEPTED,
                timeout_keep_alive=max(1, round(limits.read_seconds)),
                timeout_graceful_shutdown=_CLOSING_SECONDS,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="http", daemon=True
        )

    def start(self) -> None:
        """Start the thread, and return once it accepts requests."""
        self._thread.start()
        self._begun.wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._failed)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.01)
        with contextlib.suppress(OSError):  # the socket may already be closed
            # uvicorn listened with its smaller ``backlog``; let more connections wait.
            self._listening.listen(_BACKLOG)
        self._begun.set()
        await serving

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that occurred outside any request, such as when accepting a connection."""
        message, error = context["message"], context.get("exception")
        self._rare_log.say(message, f"error: {message}" + f" ({error})" * (error is not None))

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Schedule a coroutine in the server's event loop, from any thread. Return its future."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    @property
    def alive(self) -> bool:
        """True while the server answers requests."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Refuse new connections, and wait a few seconds for clients to read their responses."""
        self._server.should_exit = True
        self._thread.join(_CLOSING_SECONDS + 5)
        self._listening.close()


def most_connections() -> int:
    """Return the number of connections for which there are file descriptors, at least 1."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 2**31
    folder = Path("/dev/fd")  # on Linux and macOS
    free = most - (len(list(folder.iterdir())) if folder.is_dir() else 0)
    return max(1, free - _OTHER_DESCRIPTORS, free // 4)


class BoundedConnection(H11Protocol):
    """Connection with timeouts.

    It closes itself if no complete request head arrives within ``read_seconds``, if its client
    reads nothing of a response for ``write_seconds``, or if too many response bytes are unread
    in total and this connection has the most. It aborts the transport instead of closing it in
    uvicorn's way, which waits for the client.

    Above ``limit_concurrency`` connections the newest gets status 503 and is closed within a
    second. If there are many more, it is closed at once, to avoid running out of file
    descriptors."""

    read_seconds = 30.0
    write_seconds = 30.0
    rare_log: RareLog

    def connection_made(self, transport: Any) -> None:
        """Start the timeout checks."""
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
        """Stop the timeout checks."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _idle(self) -> bool:
        """True if no response is due: no request has begun, or it was answered before its end."""
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
