"""The server as an ASGI application."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from megatron.apps.generation.server.errors import RequestError
from megatron.apps.generation.server.exchange import JSON
from megatron.apps.generation.server.guard import Access, Guard
from megatron.apps.generation.server.megatron_api import megatron_router
from megatron.apps.generation.server.metrics import CONTENT_TYPE
from megatron.apps.generation.server.openai_api import openai_router
from megatron.apps.generation.server.page_files import page_router
from megatron.apps.generation.server.service import Service


def build_app(service: Service, access: Access | None = None) -> FastAPI:
    """All that a server answers: Megatron's and OpenAI's API, ``/health``, ``/metrics``, and the
    page at ``/``."""
    access = access or Access()
    # The pages that describe an API load scripts from elsewhere.
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
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    app.add_middleware(Guard, access=access, metrics=service.metrics, log=service.log)
    if access.origins:  # around the guard, whose refusals such a page may read
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


async def _refused(request: Request, error: Any) -> Response:
    """What has no route, in the form of the other errors."""
    texts = {404: "there is nothing at this path", 405: "this path has no such method"}
    refused = RequestError(texts.get(error.status_code, str(error.detail)), error.status_code)
    headers = {**refused.headers, **(error.headers or {})}
    return JSON(refused.body(request.url.path), status_code=error.status_code, headers=headers)
