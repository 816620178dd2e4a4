"""The page on which people try a model: its files, as they were when the server started."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException, Response

FOLDER = Path(__file__).parent / "page"
FIRST = "index.html"
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media type by ending; files with other endings are not served."""

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every file: nothing from elsewhere, no inline script, not inside another page."""


def page_router() -> APIRouter:
    """Routes of the page, ``/`` and ``/page/NAME``.

    The files are read here, once. A request chooses among them by name, and opens none.
    """
    files = {
        file.name: file.read_bytes() for file in FOLDER.iterdir() if _ending(file.name) in TYPES
    }
    router = APIRouter(include_in_schema=False)

    def answer(name: str) -> Response:
        return Response(files[name], media_type=TYPES[_ending(name)], headers=HEADERS)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def first() -> Response:
        return answer(FIRST)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "the page has no such file")
        return answer(name)

    return router


def _ending(name: str) -> str:
    return name.rpartition(".")[2]
