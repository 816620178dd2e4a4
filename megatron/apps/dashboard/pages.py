"""The files of a web page that a program of this project shows, and how a browser may use them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SHARED = Path(__file__).parent / "shared"
"""Parts that all pages have: colours and controls, their switch, how elements are made."""

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media type by ending; files with other endings are not served."""

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
"""Headers of every file: nothing from elsewhere, no inline script, not inside another page."""


class PageFile(NamedTuple):
    """A file of a page, as sent to clients."""

    content: bytes
    media_type: str


def page_files(folder: Path) -> dict[str, PageFile]:
    """The files of a page and the shared ones, by name. They are read here, once: a request chooses
    among them, and opens none."""
    files = (file for each in (SHARED, folder) for file in sorted(each.iterdir()))
    return {
        file.name: PageFile(file.read_bytes(), media_type)
        for file in files
        if (media_type := _TYPES.get(file.suffix[1:])) is not None
    }
