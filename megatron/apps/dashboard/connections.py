"""An HTTP server with a thread for each connection, of which it has a bounded number."""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from typing import Any

from megatron.util.errors import RareLog, one_line

_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class BoundedServer(ThreadingHTTPServer):
    """Closes a connection whose request is not complete after ``request_seconds``. Where there are
    too many, that of them which has been silent for longest makes room for a new one; if all are
    being answered, the new one gets status 503."""

    daemon_threads = True
    request_queue_size = 128
    most_connections = 200
    request_seconds = 60.0

    def __init__(self, *arguments: Any) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            self.most_connections = min(self.most_connections, max(1, files // 4))
        self._lock = threading.Lock()
        self._silent: dict[Any, float] = {}
        """Connections without a complete request, and since when, the oldest first."""
        self._count = 0
        self._log = RareLog(lambda line: print(line, file=sys.stderr, flush=True))
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread, if there is room."""
        with self._lock:
            is_full = self._count >= self.most_connections
            oldest = next(iter(self._silent), None) if is_full else None
            if oldest is not None:
                self._cut(oldest)
            refused = is_full and oldest is None
            if not refused:
                self._count += 1
                self._silent[request] = time.monotonic()
        if is_full:
            line = f"{self.most_connections} clients are connected: others are refused"
            self._log.say("connections", line)
        if not refused:
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.setblocking(False)
            request.send(_REFUSAL)
        super().shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection that was answered."""
        with self._lock:
            self._count -= 1
            self._silent.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cuts connections that send too slowly."""
        with self._lock:
            end = time.monotonic() - self.request_seconds
            for request in [one for one, since in self._silent.items() if since < end]:
                self._cut(request)

    @contextmanager
    def answering(self, request: Any) -> Iterator[None]:
        """Keeps a connection, whose request is complete, until it is answered."""
        with self._lock:
            self._silent.pop(request, None)
        try:
            yield
        finally:
            with self._lock:
                self._silent[request] = time.monotonic()

    def _cut(self, request: Any) -> None:
        """Lets the thread of a connection see its end."""
        del self._silent[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says what has failed, at most once a minute; clients that go away are no failure."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self._log.say("error", f"error: {type(error).__name__}: {one_line(error)}")
