"""HTTP server with a bounded number of connections. It parses requests more strictly than the
standard library.

A proxy in front of the server and the server itself must agree on where a request ends. Ambiguous
requests (with a body, a header folded over two lines, or a line end of a single character) are
refused with one response, after which the connection is closed.
"""

from __future__ import annotations

import io
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron.util.errors import RareLog, one_line

_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class BoundedServer(ThreadingHTTPServer):
    """Server with a thread for each of a bounded number of connections. It closes a connection
    whose request is not complete after ``request_seconds``. If there are too many connections, the
    one that has waited longest for a request is closed in favour of a new one. If requests are
    being answered on all of them, the new one gets status 503."""

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
        """Connections that wait for a complete request, with the start time of the wait, oldest
        first."""
        self._count = 0
        self._log = RareLog(lambda line: print(line, file=sys.stderr, flush=True))
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
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
        with self._lock:
            self._count -= 1
            self._silent.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that send a request too slowly."""
        with self._lock:
            end = time.monotonic() - self.request_seconds
            for request in [one for one, since in self._silent.items() if since < end]:
                self._cut(request)

    @contextmanager
    def answering(self, request: Any) -> Iterator[None]:
        """Protect a connection with a complete request from being closed until it is answered."""
        with self._lock:
            self._silent.pop(request, None)
        try:
            yield
        finally:
            with self._lock:
                self._silent[request] = time.monotonic()

    def _cut(self, request: Any) -> None:
        """Shut a connection down, so that its thread sees the end of the stream."""
        del self._silent[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, at most once a minute. Clients that disconnect are not errors."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self._log.say("error", f"error: {type(error).__name__}: {one_line(error)}")


# maximum bytes of a request's first line, and of all its headers together
MOST_HEADER_BYTES = 1 << 15
MOST_HEADERS = 100
_FIRST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.[01]\r\n")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t\x20-\x7e\x80-\xff]*\r\n")
_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding"})
_METHODS = ("GET", "HEAD")
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 1 << 20


class RefusedError(Exception):
    """Raised to refuse a request, with the HTTP status and message of the response."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class StrictHandler(BaseHTTPRequestHandler):
    """Handler of GET and HEAD requests without a body. All other requests are answered by
    ``refuse``."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    server: BoundedServer
    command, requestline, headers = "", "", HTTPMessage()
    raw_requestline: bytes

    def refuse(self, error: RefusedError) -> None:
        """Send the response to a refused request."""
        raise NotImplementedError

    def parse_request(self) -> bool:
        """Read and check a request's headers. Return False after refusing the request."""
        self.command, self.request_version, self.headers = "", self.protocol_version, HTTPMessage()
        self.close_connection = True
        stream = self.rfile
        try:
            headers = self._read_headers()
            self.rfile = io.BufferedReader(io.BytesIO(headers))  # type: ignore[arg-type]
            if not super().parse_request():
                return False
            self._check()
        except RefusedError as error:
            self._refuse_and_close(error)
            return False
        finally:
            self.rfile = stream
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that the standard library's parser rejects."""
        self._refuse_and_close(RefusedError(code, message or "not a request"))

    def _refuse_and_close(self, error: RefusedError) -> None:
        self.close_connection = True
        self.refuse(error)
        self._linger()

    def _read_headers(self) -> bytes:
        """Return the header lines, including the empty line at the end."""
        if len(self.raw_requestline) > MOST_HEADER_BYTES:
            raise RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
        if not _FIRST.fullmatch(self.raw_requestline):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "not a request")
        lines: list[bytes] = []
        names: list[bytes] = []
        room = MOST_HEADER_BYTES
        while (line := self.rfile.readline(room + 1)) != b"\r\n":
            room -= len(line)
            if room < 0 or len(lines) == MOST_HEADERS:
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                raise RefusedError(status, "the headers are too long or too many")
            if (header := _HEADER.fullmatch(line)) is None:
                raise RefusedError(HTTPStatus.BAD_REQUEST, "a header is malformed")
            lines.append(line)
            names.append(header[1].lower())
        if any(names.count(name) > 1 for name in _ONCE):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "a header is there twice")
        return b"".join((*lines, line))

    def _check(self) -> None:
        headers = self.headers
        if self.command not in _METHODS:
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "the method is GET or HEAD")
        if "Transfer-Encoding" in headers or headers.get("Content-Length", "0").strip() != "0":
            raise RefusedError(HTTPStatus.BAD_REQUEST, "a request has no body here")
        if self.request_version == "HTTP/1.1" and "Host" not in headers:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the Host header is missing")
        if self.path.startswith("/"):
            return
        absolute, host = self.path.partition("://"), headers.get("Host", "").strip()
        authority, slash, rest = absolute[2].partition("/")
        if absolute[0].lower() != "http" or authority.lower() != host.lower():
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the address is not this server's")
        self.path = f"/{rest.lstrip('/')}" if slash else "/"

    def handle_expect_100(self) -> bool:
        """Refuse an "Expect: 100-continue" header, since requests must not have a body."""
        raise RefusedError(HTTPStatus.EXPECTATION_FAILED, "a request has no body here")

    def _linger(self) -> None:
        """Read a bounded amount of what the client still sends. If a connection is closed with
        unread data, the system drops the response, too."""
        self.wfile.flush()
        end, read = time.monotonic() + _LINGER_SECONDS, 0
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while read < _LINGER_BYTES and (left := end - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not (content := self.connection.recv(1 << 16)):
                    break
                read += len(content)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""
