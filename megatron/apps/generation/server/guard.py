"""What every request goes through: who may ask, what a browser is told, and a line in the log."""

from __future__ import annotations

import hmac
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import orjson

from megatron.apps.generation.server.errors import RequestError
from megatron.apps.generation.server.exchange import ClientGone
from megatron.apps.generation.server.metrics import (
    Metrics,
    RequestRecord,
    current_record,
)

ENDPOINTS = frozenset(
    f"{prefix}/{name}"
    for prefix in ("", "/v1")
    for name in ("completions", "chat/completions", "models")
) | {"/api", "/health", "/metrics", "/"}
"""Of the metrics; all other paths are one."""
_GONE = 499
"""The status that is logged when the client went away."""
_SECURITY = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Access:
    """Who may use a server.

    Attributes:
        key: what clients must send; None for nothing.
        host: the address that the server listens on.
        origins: other sites whose pages may use it; "*" for all.
    """

    key: str | None = None
    host: str = "127.0.0.1"
    origins: Collection[str] = ()

    def check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raises RequestError for a client that may not."""
        if self.key is None:
            self._check_host(headers)
        self._check_origin(headers)
        if self.key is not None and not _is_open(path):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            same = hmac.compare_digest(given.strip(), self.key.encode())
            if scheme.lower() != b"bearer" or not same:
                text = "a key is needed: send the header Authorization: Bearer KEY"
                raise RequestError(text, 401, code="invalid_api_key")

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """A page of another site, whose name leads to this machine, sends that name."""
        host = headers.get(b"host", b"localhost").decode("latin-1")
        name = _split(f"//{host}").hostname
        if name not in _LOCAL_NAMES and name != self.host:
            text = f"Host {host[:200]!r} is not this server's; it takes others with --api-key only"
            raise RequestError(text, 403, code="wrong_host")

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """A browser sends the site whose page asks; other clients send none."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        own = _split(origin).netloc == headers.get(b"host", b"").decode("latin-1")
        if origin and not own and not {origin, "*"} & set(self.origins):
            text = f"pages of {origin[:200]} may not use this server; --allow-origin says which may"
            raise RequestError(text, 403, code="wrong_origin")


def _check_framing(headers: dict[bytes, bytes]) -> None:
    """A proxy may take the one length where the server takes the other, and so see requests that
    it did not check as part of a body."""
    if {b"content-length", b"transfer-encoding"} <= headers.keys():
        text = "Content-Length and Transfer-Encoding contradict each other; send one of them"
        raise RequestError(text, close=True)


def _split(url: str) -> SplitResult:
    """Of what is not a URL, such as ``//[``, nothing."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _is_open(path: str) -> bool:
    return path in ("/", "/health", "/favicon.ico") or path.startswith("/page/")


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: Any, access: Access, metrics: Metrics, log: Any) -> None:
        self._app, self._access, self._metrics, self._log = app, access, metrics, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await _Call(scope, send, self._log).run(self._app, receive, self._access, self._metrics)


class _Call:
    def __init__(self, scope: Any, send: Any, log: Any) -> None:
        self._scope, self._send, self._log = scope, send, log
        self._begun, self._first_byte = time.perf_counter(), 0.0
        self._status = 0

    async def run(self, app: Any, receive: Any, access: Access, metrics: Metrics) -> None:
        path = self._scope["path"]
        record = RequestRecord(client=(self._scope.get("client") or ("",))[0])
        token = current_record.set(record)
        try:
            headers = dict(self._scope["headers"])
            _check_framing(headers)
            access.check(path, headers)
            await app(self._scope, receive, self.send)
        except RequestError as error:
            await self._refuse(error)
        except ClientGone:
            self._status = _GONE
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self._log(f"error: {self._scope['method']} {path!r} failed\n{text}")
            if self._status:
                raise  # nothing can be said any more: the connection is closed
            await self._refuse(RequestError("the server failed to answer this request", 500))
        finally:
            current_record.reset(token)
            self._note(path, record, metrics)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status, self._first_byte = message["status"], time.perf_counter()
            present = {name for name, _ in message["headers"]}
            added = [pair for pair in _SECURITY if pair[0] not in present]
            message = {**message, "headers": [*message["headers"], *added]}
        await self._send(message)

    async def _refuse(self, error: RequestError) -> None:
        body = orjson.dumps(error.body(self._scope["path"]))
        named = {**error.headers, "Content-Type": "application/json"}
        headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
        headers.append((b"content-length", str(len(body)).encode()))
        start = {"type": "http.response.start", "status": error.status, "headers": headers}
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body})

    def _note(self, path: str, record: RequestRecord, metrics: Metrics) -> None:
        took = time.perf_counter() - self._begun
        status = str(self._status or _GONE)
        endpoint = path if path in ENDPOINTS else "other"
        metrics.requests.labels(endpoint, status).inc()
        metrics.seconds.observe(took)
        first = f", first byte after {self._first_byte - self._begun:.3f} s" * bool(self._status)
        tokens = f" {record.prompt_tokens} + {record.new_tokens} tokens," * bool(
            record.prompt_tokens
        )
        shown = ascii(path[:200])[1:-1]
        self._log(f"{self._scope['method']} {shown} {status}{tokens} {took:.3f} s{first}")
