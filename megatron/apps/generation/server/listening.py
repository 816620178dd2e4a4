"""An HTTP server in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn

from megatron.apps.generation.server.connections import BoundedConnection, most_connections
from megatron.config import ConfigError
from megatron.util.errors import RareLog

T = TypeVar("T")
_BACKLOG = 1024
_ACCEPTED = 16
"""Connections that are accepted before others can be closed."""
_CLOSING_SECONDS = 5
"""How long answers that are complete have to be read at the end."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that only this process has. Raises ConfigError if it cannot be had; the message
    names the flag."""
    where = f"--host {host} --port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not an address here: {error.strerror}") from None
    found = socket.socket(family, kind, protocol)
    # Otherwise the port of a server that has just ended cannot be used for a minute.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            reason = "another program listens there; choose another --port, or 0 for a free one"
        elif error.errno == errno.EADDRNOTAVAIL:
            reason = "this machine does not have the address"
        elif error.errno == errno.EACCES:
            reason = "ports below 1024 need rights that this user does not have; choose another"
        else:
            reason = os.strerror(error.errno or 0)
        raise ConfigError(f"{where}: {reason}") from None
    return found


@dataclass(frozen=True)
class ConnectionLimits:
    """Of the clients of a server; fields as its flags."""

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
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()
        self._begun.wait()

    def _run(self) -> None:
        asyncio.run(self._serve())

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
        """An error that no request answers for, such as one of accepting a connection."""
        message, error = context["message"], context.get("exception")
        self._rare_log.say(message, f"error: {message}" + f" ({error})" * (error is not None))

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Runs a coroutine in the loop of the server."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    @property
    def alive(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Takes no more connections, lets answers be read to their end, and waits for that."""
        self._server.should_exit = True
        self._thread.join(_CLOSING_SECONDS + 5)
        self._listening.close()
