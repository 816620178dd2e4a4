"""The built documentation: complete, without anything from the network, readable on a phone.

    MEGATRON_SHOTS=shots pytest tests/docs/test_site.py

also writes pictures of pages into a folder, and MEGATRON_SITE=site takes the site that `make docs`
has just built. So does a run that finds a site newer than all that it is built from; without either
`make proof` builds one.
"""

import functools
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from doc_pages import ROOT

from megatron import __version__
from megatron.config import FLAG_CLASSES, FlagParser

if not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))):
    pytest.skip("`make docs` installs what builds the site", allow_module_level=True)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "use": "href"}
"""Attributes whose address a browser loads."""

SHOTS = os.environ.get("MEGATRON_SHOTS")


def built() -> str | None:
    """The site that is looked at as it is, if there is one."""
    index = ROOT / "site" / "index.html"
    if "MEGATRON_SITE" in os.environ or not index.is_file():
        return os.environ.get("MEGATRON_SITE")
    folders = [ROOT / name for name in ("docs", "megatron", "tools", "benchmarks")]
    sources = [*ROOT.glob("*.*"), *(path for each in folders for path in each.rglob("*.*"))]
    newest = max(path.stat().st_mtime for path in sources if path.suffix != ".pyc")
    return str(index.parent) if index.stat().st_mtime > newest else None


BUILT = built()
pytestmark = [] if BUILT is not None else [pytest.mark.proof]
WIDTHS = (390, 1280)
LOOKED_AT = (
    "index.html",
    "how-to/first-run.html",
    "how-to/huggingface.html",
    "how-to/when-something-goes-wrong.html",
    "guides/tokenizers.html",
    "guides/deepspeed-json.html",
    "reference/flags.html",
    "reference/tool-flags.html",
    "reference/layouts.html",
    "evidence/measurements.html",
    "reference/api.html",
    "design/overview.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it: a link, an anchor or a page that is missing is an
    error."""
    if BUILT is not None:
        assert (Path(BUILT) / "index.html").is_file(), f"MEGATRON_SITE={BUILT} has no site"
        return Path(BUILT)
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """Addresses that a page loads, those that it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values.get("href", ""))
        if tag in LOADED and LOADED[tag] in values:
            self.loads.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def parsed(site) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def test_nothing_is_loaded_from_the_network(site, parsed):
    """No script, style, font or image, in pages or in style sheets."""
    loads = [(path, address) for path, page in parsed.items() for address in page.loads]
    for path in site.rglob("*.css"):
        loads += [(path, m) for m in re.findall(r"url\(\s*[\"']?([^)\"']+)", path.read_text())]
        loads += [(path, m) for m in re.findall(r"@import\s+[\"']([^\"']+)", path.read_text())]
    assert len(loads) > 200 and not [found for found in loads if outside(found[1])]


def outside(address: str) -> bool:
    """Whether a browser asks another machine for it."""
    return re.match(r"(https?:)?//", address) is not None


def test_what_is_loaded_from_elsewhere_is_noticed():
    page = Page(
        '<script src="https://a.b/c.js"></script><img src="//a.b/c.png">'
        '<link rel="stylesheet" href="http://a.b/c.css"><script src="assets/d.js"></script>'
        '<a href="https://a.b/">a link</a>'
    )
    assert [outside(address) for address in page.loads] == [True, True, True, False]


def test_internal_links_and_anchors(site, parsed):
    """Also those of the theme, of generated pages and of docstrings."""
    missing = []
    for path, page in parsed.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            anchors = parsed[file].anchors if file in parsed else set()
            if not file.is_file() or (anchor and anchor not in anchors):
                missing.append((path.name, link))
    assert not missing


def test_the_search_index_has_the_pages(site):
    index = (site / "search" / "search_index.json").read_text()
    for text in ("reference/flags.html", "--micro-batch-size", "softcap", "guides/collecting.html"):
        assert text in index


def test_every_flag_is_in_the_reference(site, parsed):
    page = (site / "reference" / "flags.html").read_text()
    flags = FlagParser(*FLAG_CLASSES)._option_string_actions
    names = {f for f, action in flags.items() if f.startswith("--") and action.dest != "help"}
    shown = set(re.findall(r"<code>(--[\w-]+)</code>", page))
    assert names - shown <= {"--version"}


@pytest.fixture(scope="module")
def served(site):
    """Address of a server of the site on this machine."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize(
    "scheme", ["light", pytest.param("dark", marks=() if SHOTS else pytest.mark.proof)]
)
@pytest.mark.parametrize("width", WIDTHS)
def test_in_a_browser(width, scheme, browser, served):
    """No page is wider than the screen, nothing fails, nothing is asked of another machine."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    # What fits on a phone fits on a desk: there a few pages are enough.
    for name in LOOKED_AT if SHOTS else LOOKED_AT[:: 3 if width == WIDTHS[0] else 6]:
        page.goto(f"{served}/{name}")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} is {wide} pixels wide"
        assert page.evaluate("document.body.dataset.mdColorScheme") == (
            "slate" if scheme == "dark" else "default"
        )
        if SHOTS:
            target = Path(SHOTS)
            target.mkdir(parents=True, exist_ok=True)
            stem = name.removesuffix(".html").replace("/", "-")
            page.screenshot(path=target / f"{stem}-{width}-{scheme}.png", full_page=True)
    assert not errors
    assert all(url.startswith((served, "data:", "blob:")) for url in asked), asked
    context.close()


@pytest.fixture
def search(browser, served):
    """Addresses that a search of the site lists, best first."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})

    def results(words: str) -> list[str]:
        page.goto(f"{served}/index.html")
        page.keyboard.press("/")
        page.keyboard.insert_text(words)  # at once: a part of it has other results
        page.keyboard.press("End")
        page.wait_for_selector(".md-search-result__link", timeout=20000)
        return page.eval_on_selector_all(
            ".md-search-result__link", "links => links.map(link => link.href)"
        )

    yield results
    page.close()


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--save-interval", "save-interval"),
        pytest.param("save_interval", "save-interval", marks=pytest.mark.proof),
        pytest.param("global-batch-size", "global-batch-size", marks=pytest.mark.proof),
        pytest.param("--zero-stage", "zero-stage", marks=pytest.mark.proof),
        pytest.param("-lr", "lr", marks=pytest.mark.proof),
        pytest.param("--micro_batch_size", "micro-batch-size", marks=pytest.mark.proof),
        pytest.param("tensor model parallel size", "tensor-model-parallel-size",
                     marks=pytest.mark.proof),
    ],
)  # fmt: skip
def test_a_search_for_a_flag_finds_its_place_in_the_reference_first(search, words, flag):
    links = search(words)
    assert "reference/flags.html" in links[0], links
    assert links[1].endswith(f"#{flag}"), links


def test_pages_show_the_version_and_the_repository(site):
    text = (site / "index.html").read_text()
    assert f"Version {__version__}. Apache-2.0." in text


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://example.org/team/trainer.git", "https://example.org/team/trainer"),
        ("https://user:token@example.org/team/trainer", "https://example.org/team/trainer"),
        ("git@example.org:team/trainer.git", "https://example.org/team/trainer"),
        ("ssh://git@example.org/team/trainer.git", "https://example.org/team/trainer"),
        ("/srv/git/trainer", None),
        ("", None),
    ],
)
def test_the_repository_is_linked_where_it_is_on_the_web(monkeypatch, address, expected):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    import hooks

    answer = subprocess.CompletedProcess([], 0, stdout=f"{address}\n")
    monkeypatch.setattr(hooks.subprocess, "run", lambda *_, **__: answer)
    assert hooks._repository() == expected
