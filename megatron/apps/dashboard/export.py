"""Export of the dashboard page with its runs as a single HTML file that needs no server or
network."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from megatron.apps.dashboard.pages import PageFile, page_files
from megatron.apps.dashboard.runs import AXES, WatchedRun
from megatron.apps.dashboard.tables import Column

PAGE = Path(__file__).parent / "page"
POINTS = 1500  # approximate number of points per curve
SMOOTHINGS = (0.9, 0.99)
"""Smoothing factors available in an exported file. With a server, the page offers more."""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
_STYLES = re.compile(r'<link rel="stylesheet" href="page/([\w.]+)">')
_ICON = re.compile(r'<link rel="icon" href="page/([\w.]+)" type="([\w/+]+)">')
_SCRIPTS = re.compile(r'<script src="page/([\w.]+)"(?: defer)?></script>')
_PRELOADS = re.compile(r'^ *<link rel="modulepreload" href="page/([\w.]+)">\n', re.MULTILINE)
_IMPORT = re.compile(r'(from|import) "\./([\w.]+)"')
_SERVER, _SAVED, _ENTRY = "api.js", "saved.js", "page.js"


def export(runs: Sequence[WatchedRun]) -> bytes:
    """Return an HTML file with the page, its scripts and the current data of the given runs. Curves
    are thinned without losing spikes."""
    files = page_files(PAGE)
    content = orjson.dumps([_content(run) for run in runs], option=orjson.OPT_SERIALIZE_NUMPY)
    licence = (PAGE / "uPlot.LICENSE").read_text("utf-8")
    page = files["index.html"].content.decode()
    names = _PRELOADS.findall(page)
    page = _PRELOADS.sub("", page)
    page = _STYLES.sub(lambda link: f"<style>\n{_text(files, link[1])}</style>", page)
    page = _ICON.sub(lambda link: f'<link rel="icon" href="{_data(files[link[1]])}">', page)
    page = _SCRIPTS.sub(lambda tag: f"<script>\n{_text(files, tag[1])}\n</script>", page)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n  {policy}', 1)
    modules = {name: _SAVED if name == _SERVER else name for name in (*names, _ENTRY)}
    addresses = {name: _data(_module(files[source])) for name, source in modules.items()}
    scripts = (
        f"<!-- uPlot draws the charts.\n{licence}-->\n"
        f'<script type="application/json" id="saved">{_inert(content)}</script>\n'
        f'<script type="importmap">{_inert(orjson.dumps({"imports": addresses}))}</script>\n'
        f'<script type="module">import "{_ENTRY}";</script>'
    )
    entry = f'<script type="module" src="page/{_ENTRY}"></script>'
    return page.replace(entry, scripts, 1).encode()


def _content(run: WatchedRun) -> dict[str, Any]:
    """Return the data of a run that the page would request from a server."""
    summary = run.summary()
    curves = {one["id"]: _curve(run, one["id"], one["kind"]) for one in summary["series"]}
    clocks = run.positions(POINTS)
    return {
        "listing": run.listing(),
        "summary": summary,
        "texts": run.texts(),
        "curves": curves,
        "clocks": {name: [_rounded(value, 9) for value in clocks[name].tolist()] for name in AXES},
    }


def _curve(run: WatchedRun, id: str, kind: str) -> dict[str, Any]:
    def points(count: int, factor: float) -> dict[str, Any]:
        curve: dict[str, Any] = run.series([id], "iteration", None, None, count, factor)[id]
        return curve

    smooth = {
        str(factor): _short(points(POINTS // 2, factor)["smooth"])
        for factor in (SMOOTHINGS if kind == "train" else ())
    }
    return {**_short(points(POINTS, 0.0)), "smooth": smooth}


def _short(curve: Mapping[str, Column]) -> dict[str, list[float | None]]:
    digits = {"x": 9, "y": 6}
    return {
        name: [_rounded(value, most) for value in curve[name].tolist()]
        for name, most in digits.items()
    }


def _rounded(value: float, digits: int) -> float | None:
    """Round a number to ``digits`` significant digits. Return None for values that JSON lacks."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _module(file: PageFile) -> PageFile:
    """Return a script whose imports use bare names, which the page's import map resolves."""
    text = _IMPORT.sub(r'\1 "\2"', file.content.decode())
    return PageFile(text.encode(), "text/javascript")


def _data(file: PageFile) -> str:
    return f"data:{file.media_type};base64,{base64.b64encode(file.content).decode()}"


def _text(files: Mapping[str, PageFile], name: str) -> str:
    return files[name].content.decode()


def _inert(content: bytes) -> str:
    """Escape JSON for an HTML element, so that it cannot end the element or begin another."""
    return content.decode().replace("<", "\\u003c")
