"""HTTP server of the dashboard: files of the page, and queries about runs."""

from __future__ import annotations

import gzip
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import orjson

from megatron.apps.dashboard.connections import BoundedServer, RefusedError, StrictHandler
from megatron.apps.dashboard.export import PAGE, export
from megatron.apps.dashboard.pages import PAGE_HEADERS, page_files
from megatron.apps.dashboard.runs import AXES, WatchedRun
from megatron.util.digests import hash64, sha256
from megatron.util.errors import one_line

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_COOKIE = "megatron_dashboard_{}"
"""Template of the cookie name. It includes the port, because browsers send a host's cookies to all
of its ports."""
_JSON = "application/json"
_BEAT_SECONDS = 15.0
_MOST_POINTS = 20_000
_PACKED_BYTES = 1024
_FOLLOWERS = 64  # maximum number of pages that receive live updates
_COMPOSED = 2  # number of responses computed concurrently
_READING_SECONDS = 5.0  # time limit for reading one run before the next is read
_SMALL_ANSWER, _WAITING_ANSWERS = 1 << 16, 1 << 28
"""Maximum bytes of a response that is always sent, and of all larger ones that are being sent."""


class Dashboard(BoundedServer):
    """Server that shows runs until it is shut down. A background thread reads new rows. Raises
    OSError if the address cannot be used, and ValueError if the token is empty.

    Args:
        runs: runs to show, with the ids used in URLs.
        host: address to listen on.
        port: port to listen on; 0 selects a free one.
        token: secret that every request must include; None requires none.
    """

    def __init__(
        self, runs: Sequence[WatchedRun], host: str, port: int, token: str | None = None
    ) -> None:
        if token is not None and not token.strip():
            raise ValueError("--token is empty; give a secret, or leave the flag out")
        self.runs, self.host, self.token = list(runs), host, token
        self.files = page_files(PAGE)
        self.followers = threading.BoundedSemaphore(_FOLLOWERS)
        self.composing = threading.BoundedSemaphore(_COMPOSED)
        self._sizes, self._waiting_bytes = threading.Lock(), 0
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self._reader.start()

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        key = "" if self.token is None else f"?token={quote(self.token)}"
        return f"http://{name}:{self.server_address[1]}/{key}"

    def listing(self) -> bytes:
        return orjson.dumps([run.listing() for run in self.runs])

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether the server is still running afterwards."""
        return not self._ended.wait(seconds)

    def server_bind(self) -> None:
        """Bind without HTTPServer's lookup of the host name, which could block on the network."""
        TCPServer.server_bind(self)

    def server_close(self) -> None:
        """Close the server, stop reading, and release the indices for other processes."""
        self._ended.set()
        super().server_close()
        if self._reader.ident is not None:
            self._reader.join()
        for run in self.runs:
            run.close()

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Count a response of ``size`` bytes until the client has read it. Raises RefusedError if
        the size limit on all responses is exceeded."""
        counted = size if size > _SMALL_ANSWER else 0
        with self._sizes:
            if counted and self._waiting_bytes + counted > _WAITING_ANSWERS:
                words = "too many large answers wait to be read; try again later"
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, words)
            self._waiting_bytes += counted
        try:
            yield
        finally:
            with self._sizes:
                self._waiting_bytes -= counted

    def _is_over(self, end: float) -> bool:
        return self._ended.is_set() or time.monotonic() > end

    def _read(self) -> None:
        while not self._ended.is_set():
            for run in self.runs:
                try:
                    run.refresh(partial(self._is_over, time.monotonic() + _READING_SECONDS))
                # Continue with the other runs, and retry this one later.
                except Exception as error:
                    run.failed(f"{type(error).__name__}: {error}")
            self._ended.wait(0.5)


class _Handler(StrictHandler):
    server: Dashboard

    def do_GET(self) -> None:
        with self.server.answering(self.connection):
            try:
                self._answer()
            except RefusedError as error:
                self.refuse(error)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                self.close_connection = True
            except ValueError:  # a malformed URL
                self._send(orjson.dumps({"error": "not a request"}), _JSON, status=400)
            except OSError as error:
                self._send(orjson.dumps({"error": one_line(error)}), _JSON, status=500)

    do_HEAD = do_GET

    def refuse(self, error: RefusedError) -> None:
        self._send(orjson.dumps({"error": str(error)}), _JSON, status=error.status)

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        parts = [unquote(each) for each in url.path.split("/")[1:]]
        if self._entered(parts, query):
            return
        if parts == [""]:
            parts = ["page", "index.html"]
        match parts:
            case ["page", name] if name in self.server.files:
                file = self.server.files[name]
                self._send(file.content, file.media_type, PAGE_HEADERS)
            case ["api", "updates"]:
                self._follow()
            case ["api", "runs"]:
                self._send(self.server.listing(), _JSON)
            case ["api", "export"]:
                saved = {"Content-Disposition": 'attachment; filename="runs.html"'}
                page = self._composed(lambda: export(self.server.runs))
                self._send(page, "text/html; charset=utf-8", saved)
            case ["api", "runs", id]:
                self._json(self._run(id).summary)
            case ["api", "runs", id, "texts"]:
                self._json(self._run(id).texts)
            case ["api", "runs", id, "series"]:
                self._json(partial(self._series, self._run(id), query))
            case ["api", "runs", id, "csv"]:
                self._table(self._run(id), query)
            case _:
                raise RefusedError(HTTPStatus.NOT_FOUND, "nothing is at this address")

    def _entered(self, parts: list[str], query: dict[str, list[str]]) -> bool:
        """Check the token. Raises RefusedError for a request without it. If the page's URL contains
        the token, set a cookie instead, redirect, and return True."""
        token = self.server.token
        if token is None:
            host = urlsplit(f"//{self.headers.get('Host', 'localhost')}").hostname
            if host not in LOCAL_NAMES and host != self.server.host:
                words = "this name is not the server's; it is read under others with --token only"
                raise RefusedError(HTTPStatus.FORBIDDEN, words)
            return False
        query_token, kept = query.get("token", [""])[0], sha256(token)
        name = _COOKIE.format(self.server.server_address[1])
        cookie = _cookie(self.headers.get("Cookie", ""), name)
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        pairs = ((query_token, token), (bearer, token), (cookie, kept))
        if not any(hmac.compare_digest(a.encode(), b.encode()) for a, b in pairs):
            words = "a token is needed: open the address that tools/dashboard.py printed"
            raise RefusedError(HTTPStatus.UNAUTHORIZED, words)
        if not query_token or parts != [""]:
            return False
        set_cookie = f"{name}={kept}; HttpOnly; SameSite=Strict; Path=/"
        self._send(
            b"", "text/plain", {"Location": "./", "Set-Cookie": set_cookie}, HTTPStatus.SEE_OTHER
        )
        return True

    def _run(self, id: str) -> WatchedRun:
        for run in self.server.runs:
            if run.id == id:
                return run
        raise RefusedError(HTTPStatus.NOT_FOUND, "no run has this number")

    def _series(self, run: WatchedRun, query: dict[str, list[str]]) -> dict[str, Any]:
        points = int(_number(query, "points", 700.0, 10, _MOST_POINTS))
        factor = _number(query, "smooth", 0.0, 0.0, 0.9999)
        return _known(run.series, *_part(query), points, factor)

    def _table(self, run: WatchedRun, query: dict[str, list[str]]) -> None:
        part = _part(query)
        table = self._composed(lambda: _known(lambda: "".join(run.table(*part)).encode()))
        headers = {"Content-Disposition": 'attachment; filename="run.csv"'}
        self._send(table, "text/csv; charset=utf-8", headers)

    def _json(self, make: Callable[[], Any]) -> None:
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        self._send(self._composed(lambda: orjson.dumps(make(), option=options)), _JSON)

    def _composed(self, make: Callable[[], bytes]) -> bytes:
        """Compute an expensive response. Only a few are computed concurrently."""
        with self.server.composing:
            return make()

    def _follow(self) -> None:
        """Send the list of runs as a server-sent event whenever the list changes."""
        if not self.server.followers.acquire(blocking=False):
            words = f"{_FOLLOWERS} pages are open already; close one"
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, words)
        try:
            self._send_updates()
        finally:
            self.server.followers.release()

    def _send_updates(self) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (("Content-Type", "text/event-stream"), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        shown, beat = b"", time.monotonic()
        while self.command != "HEAD":
            listing = self.server.listing()
            if listing != shown:
                self.wfile.write(b"data: " + listing + b"\n\n")
                shown, beat = listing, time.monotonic()
            elif time.monotonic() - beat > _BEAT_SECONDS:
                self.wfile.write(b": beat\n\n")
                beat = time.monotonic()
            self.wfile.flush()
            if not self.server.wait(0.5):
                return

    def _send(
        self,
        body: bytes,
        media_type: str,
        headers: dict[str, str] | None = None,
        status: int = HTTPStatus.OK,
    ) -> None:
        headers = {**PAGE_HEADERS, **(headers or {}), "Vary": "Accept-Encoding, Cookie"}
        if self.close_connection:
            headers["Connection"] = "close"
        if status == HTTPStatus.OK:
            headers["ETag"] = tag = f'"{hash64(body):016x}"'
            if self.headers.get("If-None-Match") == tag:
                status, body = HTTPStatus.NOT_MODIFIED, b""
        packs = "gzip" in self.headers.get("Accept-Encoding", "")
        if packs and len(body) > _PACKED_BYTES:
            body = gzip.compress(body, 1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        with self.server.sending(len(body)):
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie, which this server has set and which therefore needs no
    unquoting."""
    for pair in header.split(";"):
        key, _, value = pair.strip().partition("=")
        if key == name:
            return value
    return ""


def _known(answer: Any, *arguments: Any) -> Any:
    try:
        return answer(*arguments)
    except KeyError as error:
        words = f"the run has no series {str(error)[:200]}"
        raise RefusedError(HTTPStatus.NOT_FOUND, words) from None
    except OverflowError as error:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from None


def _part(
    query: dict[str, list[str]],
) -> tuple[Sequence[str], str, float | None, float | None]:
    """Return the ids of the requested series, their axis, and the first and last position on it."""
    axis = query.get("x", ["iteration"])[0]
    if axis not in AXES:
        words = f"x={axis[:100]}: an axis is one of {', '.join(AXES)}"
        raise RefusedError(HTTPStatus.BAD_REQUEST, words)
    first, last = (_number(query, name, 0.0) if name in query else None for name in ("from", "to"))
    return query.get("id", [])[:200], axis, first, last


def _number(
    query: dict[str, list[str]],
    name: str,
    default: float,
    least: float = float("-inf"),
    most: float = float("inf"),
) -> float:
    text = query.get(name, [str(default)])[0]
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:  # false for NaN, too
        words = f"{name}={text[:100]}: expected a number"
        raise RefusedError(HTTPStatus.BAD_REQUEST, words)
    return value
