"""Pages in a browser without a window, and what is true of every page of this project."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
SHOTS = os.environ.get("MEGATRON_SHOTS")
"""Folder for pictures of pages, if some are wanted."""
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 800}
MARKUP = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
SHARED = Path(__file__).parents[2] / "megatron/apps/dashboard/shared"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips the test where none is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed on this machine")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Visit:
    """A page that a user has opened, in a browser profile of its own."""

    def __init__(self, browser: Any, url: str, script: str = "", **context: Any) -> None:
        context = {"viewport": DESK, "reduced_motion": "reduce", **context}
        self.context = browser.new_context(**context)
        self.context.set_default_timeout(10_000)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)
        self.url = url
        self.context.add_init_script(script)
        self.page.goto(url)

    def _note(self, message: Any) -> None:
        # What the server refuses is listed there too; the page shows it.
        if message.type == "error" and "status of" not in message.text:
            self.complaints.append(message.text)

    def click(self, button: str) -> None:
        """The first button with this name."""
        self.page.get_by_role("button", name=button, exact=True).first.click()

    def width(self) -> int:
        """Pixels that the page needs from left to right."""
        return self.page.evaluate("document.documentElement.scrollWidth")

    def outside(self) -> list[str]:
        """Elements that the left or right edge of the window cuts off."""
        return self.page.evaluate(
            "[...document.querySelectorAll('main *, header *')].filter(one => {"
            "  const box = one.getBoundingClientRect();"
            "  const drawn = getComputedStyle(one).position !== 'absolute';"
            "  return drawn && (box.left < 0 || box.right > innerWidth + 1);"
            "}).map(one => one.outerHTML.slice(0, 80))"
        )

    def contrasts(self) -> list[tuple[float, str]]:
        """Of every text that is seen: its contrast to its ground, and which it is."""
        return self.page.evaluate(_CONTRASTS)

    def close(self) -> None:
        """Checks that no script failed and nothing was asked of another machine."""
        assert not self.complaints
        here = self.url.partition("#")[0].partition("?")[0]
        assert all(url.startswith((here, "blob:")) for url in self.asked), self.asked
        self.context.close()


def assert_no_markup_is_made(folder: Path) -> None:
    """No script of a page makes markup of a text, or runs one."""
    own = [path for path in folder.glob("*.js") if not path.name.startswith("uPlot")]
    code = "".join(path.read_text("utf-8") for path in (*own, *SHARED.glob("*.js")))
    assert own and not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", code
    )


_CONTRASTS = """() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    paint.fillStyle = color;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (color) => {
    const [r, g, b] = rgb(color).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return "white";
  };
  const texts = [...document.querySelectorAll("body *")].filter((one) =>
    one.checkVisibility() && !one.disabled &&
    [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
  return texts.map((one) => {
    const [a, b] = [light(getComputedStyle(one).color), light(ground(one))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), `${one.tagName} ${one.className} ${one.textContent}`];
  });
}"""
