"""Files of the web pages that programs of this project serve, and the HTTP headers for them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SHARED = Path(__file__).parent / "shared"
"""Files shared by all pages: styles, controls, the theme switch, and helpers for elements."""

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media type by file extension. Files with other extensions are not served."""

PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers sent with every file. They forbid content from other origins, inline scripts, and
embedding in another page."""


class PageFile(NamedTuple):
    """File of a page, as sent to clients."""

    content: bytes
    media_type: str


def page_files(folder: Path) -> dict[str, PageFile]:
    """Return the files of a page and the files shared by all pages, by name. All are read when this
    is called, so that a request never opens a file."""
    files = (file for each in (SHARED, folder) for file in sorted(each.iterdir()))
    return {
        file.name: PageFile(file.read_bytes(), media_type)
        for file in files
        if (media_type := _TYPES.get(file.suffix[1:])) is not None
    }
