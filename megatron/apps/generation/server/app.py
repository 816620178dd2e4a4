"""ASGI application of the server: routes, and checks that apply to every request."""

from __future__ import annotations

import hmac
import time
import traceback
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from megatron.apps.dashboard.pages import PAGE_HEADERS, page_files
from megatron.apps.generation.server.exchange import JSON, ClientGone, RequestError
from megatron.apps.generation.server.megatron_api import megatron_router
from megatron.apps.generation.server.metrics import Metrics, RequestRecord, current_record
from megatron.apps.generation.server.openai_api import openai_router
from megatron.apps.generation.server.service import Service

# Endpoint labels in the metrics. All other paths are counted as "other".
ENDPOINTS = frozenset(
    f"{prefix}/{name}"
    for prefix in ("", "/v1")
    for name in ("completions", "chat/completions", "models")
) | {"/api", "/health", "/metrics", "/"}
_GONE = 499  # status that is logged if the client has disconnected
_SECURITY = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


@dataclass(frozen=True)
class Access:
    """Access rules of a server. ``key`` is the API key that clients must send (None if no key is
    needed). ``host`` is the server's address. ``origins`` contains other sites whose pages may use
    the server ("*" for all sites)."""

    key: str | None = None
    host: str = "127.0.0.1"
    origins: Collection[str] = ()

    def check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Check a request's path and headers. Raises RequestError if the client has no access."""
        site = headers.get(b"host", b"localhost").decode("latin-1")
        name = _split(f"//{site}").hostname
        # DNS rebinding: a site whose name resolves to this machine sends its own name as Host.
        if self.key is None and name not in {"localhost", "127.0.0.1", "::1", self.host}:
            text = f"Host {site[:200]!r} is not this server's; it takes others with --api-key only"
            raise RequestError(text, 403, code="wrong_host")
        # Browsers send the origin of the page that makes the request; other clients send none.
        origin = headers.get(b"origin", b"").decode("latin-1")
        is_own = _split(origin).netloc == headers.get(b"host", b"").decode("latin-1")
        if origin and not is_own and not {origin, "*"} & set(self.origins):
            text = f"pages of {origin[:200]} may not use this server; --allow-origin says which may"
            raise RequestError(text, 403, code="wrong_origin")
        is_open = path in ("/", "/health", "/favicon.ico") or path.startswith("/page/")
        if self.key is not None and not is_open:
            scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
            same = hmac.compare_digest(sent.strip(), self.key.encode())
            if scheme.lower() != b"bearer" or not same:
                text = "a key is needed: send the header Authorization: Bearer KEY"
                raise RequestError(text, 401, code="invalid_api_key")


def _split(url: str) -> SplitResult:
    """Return the components of a URL. All are empty if it is not valid, such as ``//[``."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


class Guard:
    """ASGI middleware that checks access, adds security headers, converts exceptions to error
    responses, and logs requests."""

    def __init__(self, app: Any, access: Access, metrics: Metrics, log: Any) -> None:
        self._app, self._access, self._metrics, self._log = app, access, metrics, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, receive, send)
        token = current_record.set(call.record)
        try:
            headers = dict(scope["headers"])
            if {b"content-length", b"transfer-encoding"} <= headers.keys():
                # Request smuggling: if a proxy uses one length and the server the other, the end of
                # a body could pass as a request that the proxy has not checked.
                lengths = "Content-Length and Transfer-Encoding"
                raise RequestError(f"{lengths} contradict each other; send one of them", close=True)
            self._access.check(scope["path"], headers)
            await self._app(scope, receive, call.send)
        except RequestError as error:
            await call.refuse(error)
        except ClientGone:
            call.status = _GONE
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self._log(f"error: {scope['method']} {scope['path']!r} failed\n{text}")
            if call.status:
                raise  # the response has begun: close the connection
            await call.refuse(RequestError("the server failed to answer this request", 500))
        finally:
            current_record.reset(token)
            endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"
            self._metrics.requests.labels(endpoint, str(call.status or _GONE)).inc()
            self._metrics.seconds.observe(time.perf_counter() - call.begun)
            self._log(call.line())


class _Call:
    """One request with its log record, and the status of its response."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.record = RequestRecord(client=(scope.get("client") or ("",))[0])
        self.begun, self._first_byte, self.status = time.perf_counter(), 0.0, 0

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self._first_byte = message["status"], time.perf_counter()
            present = {name for name, _ in message["headers"]}
            added = [pair for pair in _SECURITY if pair[0] not in present]
            message = {**message, "headers": [*message["headers"], *added]}
        await self._send(message)

    async def refuse(self, error: RequestError) -> None:
        answer = JSON(error.body(self._scope["path"]), error.status, error.headers)
        await answer(self._scope, self._receive, self.send)

    def line(self) -> str:
        """Return the log line of the request."""
        took, record = time.perf_counter() - self.begun, self.record
        first = f", first byte after {self._first_byte - self.begun:.3f} s" if self.status else ""
        tokens = ""
        if record.prompt_tokens:
            tokens = f" {record.prompt_tokens} + {record.new_tokens} tokens,"
        path = ascii(self._scope["path"][:200])[1:-1]
        return f"{self._scope['method']} {path} {self.status or _GONE}{tokens} {took:.3f} s{first}"


def build_app(service: Service, access: Access | None = None) -> FastAPI:
    """Return the application with Megatron's and OpenAI's APIs, ``/health``, ``/metrics``, and the
    web page at ``/``."""
    access = access or Access()
    # FastAPI's documentation pages load scripts from other sites.
    app = FastAPI(title="Text generation", docs_url=None, redoc_url=None, openapi_url=None)
    for router in (megatron_router(service), openai_router(service), page_router()):
        app.include_router(router)
    app.add_exception_handler(HTTPException, _refused)

    @app.get("/health")
    async def health() -> JSON:
        stats = service.stats()
        numbers = {} if stats is None else {k: asdict(stats)[k] for k in ("running", "waiting")}
        state = service.state
        return JSON({"status": state, **numbers}, status_code=200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    app.add_middleware(Guard, access=access, metrics=service.metrics, log=service.log)
    if access.origins:  # outside the guard, so that pages can read its refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


async def _refused(request: Request, error: Any) -> Response:
    """Answer a request that matches no route, in the same format as other errors."""
    texts = {404: "there is nothing at this path", 405: "this path has no such method"}
    refused = RequestError(texts.get(error.status_code, str(error.detail)), error.status_code)
    headers = {**refused.headers, **(error.headers or {})}
    return JSON(refused.body(request.url.path), status_code=error.status_code, headers=headers)


def page_router() -> APIRouter:
    """Return the routes of the web page for trying a model, ``/`` and ``/page/NAME``. Files are
    read only once, when this is called."""
    files = page_files(Path(__file__).parent / "page")
    router = APIRouter(include_in_schema=False)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "the page has no such file")
        page = files[name]
        return Response(page.content, media_type=page.media_type, headers=PAGE_HEADERS)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def first() -> Response:
        return await file("index.html")

    return router
