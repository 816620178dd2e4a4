"""An HTTP server in a separate thread, whose connections are bounded in number and time."""

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
_ACCEPTED = 16  # connections that are accepted before others can be closed
_CLOSING_SECONDS = 5  # for clients to read complete answers at the end
_CHECKS = 8  # of a connection within each of its two times
_UNREAD = 2**26  # bytes of answers of all clients that may wait to be read
_UNREAD_OF_ONE = 2**16  # bytes of a client that are never too many
# File descriptors kept free: for the processes of chat templates and constraints, for files, and
# for connections that are refused and not closed yet.
_OTHER_DESCRIPTORS = 128
_OVER = 32  # connections above the limit that still get an answer, status 503


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that only this process has. Raises ConfigError, which names the flag."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not an address here: {error.strerror}") from None
    listening = socket.socket(family, kind, protocol)
    # Otherwise the port of a server that has just ended cannot be used for a minute.
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
    """Limits of a server's clients; fields as its flags."""

    connections: int = 1024
    read_seconds: float = 30.0
    write_seconds: float = 30.0


class HTTPThread:
    """Serves an application until :meth:`close`."""

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
                limit_concurrency=connections + 1,  # with the one that is refused
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
        """Returns when requests are answered."""
        self._thread.start()
        self._begun.wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._failed)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.01)
        with contextlib.suppress(OSError):  # it may be closed already
            self._listening.listen(_BACKLOG)  # more may wait than are accepted at a time
        self._begun.set()
        await serving

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs an error outside of all requests, such as one of accepting a connection."""
        message, error = context["message"], context.get("exception")
        self._rare_log.say(message, f"error: {message}" + f" ({error})" * (error is not None))

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Runs a coroutine in the loop of the server."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    @property
    def alive(self) -> bool:
        """True while it answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Refuses connections, and waits until answers are read to their end."""
        self._server.should_exit = True
        self._thread.join(_CLOSING_SECONDS + 5)
        self._listening.close()


def most_connections() -> int:
    """Connections for which this process has file descriptors, in addition to its present ones."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 2**31
    folder = Path("/dev/fd")  # of Linux and macOS
    free = most - (len(list(folder.iterdir())) if folder.is_dir() else 0)
    return max(1, free - _OTHER_DESCRIPTORS, free // 4)


class BoundedConnection(H11Protocol):
    """A connection that closes itself when no request comes, or its head does not end, within
    ``read_seconds``, and when nothing of an answer is read for ``write_seconds``, or its client is
    the one that has most to read while all have too much. uvicorn's own closing waits for the other
    side to read.

    With more than ``limit_concurrency`` of them the newest gets status 503 and is soon closed, or
    at once if there are many more: the process must not run out of file descriptors."""

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
        """True if no answer is owed: no request has begun, or it was answered before its end."""
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
