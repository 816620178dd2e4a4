"""The page on which people try a model: its files, as they were when the server started."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException, Response

from megatron.util.pages import PAGE_HEADERS, page_files

FOLDER = Path(__file__).parent / "page"
FIRST = "index.html"


def page_router() -> APIRouter:
    """Routes of the page, ``/`` and ``/page/NAME``."""
    files = page_files(FOLDER)
    router = APIRouter(include_in_schema=False)

    def answer(name: str) -> Response:
        file = files[name]
        return Response(file.content, media_type=file.media_type, headers=PAGE_HEADERS)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def first() -> Response:
        return answer(FIRST)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "the page has no such file")
        return answer(name)

    return router
