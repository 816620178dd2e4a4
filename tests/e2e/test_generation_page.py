"""The page of the generation server, in a browser.

    MEGATRON_SHOTS=docs/pictures pytest tests/e2e/test_generation_page.py -k pictures

writes the pictures of the guide.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
    pytest.importorskip(name, reason="pip install -e '.[serve]'")
pytest.importorskip("httpx", reason="pip install httpx")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

from browser import MARKUP, PHONE, SHOTS, assert_no_markup_is_made, chromium  # noqa: E402
from browser import Visit as PageVisit  # noqa: E402
from counted_server import CountedServer, counted_server  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "megatron/apps/generation/server/page"
COMPLETIONS = re.compile("completions$")
PROMPT = "The checkpoint of a"


@pytest.fixture(scope="module")
def server() -> Iterator[CountedServer]:
    with counted_server() as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[CountedServer]:
    """20 tokens a second."""
    with counted_server(delay=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


class Visit(PageVisit):
    """The page of the server, opened in one of its modes."""

    def __init__(self, browser, url: str, mode: str = "completion", **context) -> None:
        script = f"localStorage['megatron.mode'] ??= '\"{mode}\"'"
        super().__init__(browser, url, script, **context)

    def ready(self):
        self.page.wait_for_selector("#health[data-state=up]")
        return self

    def set(self, **settings) -> None:
        for name, value in settings.items():
            control = self.page.locator(f"#{name}")
            if isinstance(value, bool):
                control.set_checked(value)
            elif name == "format":
                control.select_option(value)
            else:
                control.fill(str(value))

    def send(self, text: str) -> None:
        self.page.fill("#draft", text)
        self.page.press("#draft", "Enter")

    def ended(self) -> None:
        """Waits for the end of the last answer."""
        self.page.wait_for_selector(".turn.growing", state="detached")
        self.page.wait_for_selector("#send:not(.stop)")

    def answer(self) -> str:
        """Text of the last turn as the page keeps it."""
        mode = self.page.locator("[name=mode]:checked").get_attribute("value")
        texts = json.loads(self.page.evaluate("localStorage.getItem('megatron.texts')"))
        return texts[mode][-1]["text"]

    def shown(self) -> str:
        """Text of the last turn as it is seen."""
        return self.page.locator(".turn .text").last.text_content()


@pytest.fixture
def visit(browser):
    """Opens pages, and checks when the test is over that no script failed and nothing was asked of
    another machine."""
    visits = []

    def opened(url: str, *arguments, **keywords) -> Visit:
        visits.append(Visit(browser, url, *arguments, **keywords))
        return visits[-1]

    yield opened
    for one in visits:
        one.close()


def events(*chunks: dict) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def scripted(visit: Visit, body: str, status: int = 200) -> None:
    """Has the next completion answered with what a server could answer."""
    kind = "text/event-stream" if status == 200 else "application/json"
    headers = {"Content-Type": kind}
    visit.page.route(
        COMPLETIONS, lambda route: route.fulfill(status=status, body=body, headers=headers)
    )


def test_completion_with_its_probabilities(visit, server):
    """The text is the server's; each token has its probability as level, in its name and, for the
    mouse and for the keyboard, in a card with the alternatives."""
    one = visit(server.url).ready()
    page = one.page
    assert page.locator("#model").input_value() == server.name
    one.set(temperature=0, max_tokens=24, probabilities=True, alternatives=4)
    one.send(PROMPT)
    one.ended()
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "logprobs": 4}
    expected = server.post("/v1/completions", asked)["choices"][0]
    assert one.answer() == expected["text"] and one.shown() == PROMPT + expected["text"]
    tokens = page.locator("#turns .token")
    assert tokens.all_text_contents() == expected["logprobs"]["tokens"]
    percents = [100 * 2.718281828**x for x in expected["logprobs"]["token_logprobs"]]
    levels = [sum(p < least for least in (80, 50, 20, 5)) for p in percents]
    classes = tokens.evaluate_all("found => found.map(token => token.className)")
    assert [int(re.search(r"level-(\d)", name)[1]) for name in classes] == levels
    assert f"{percents[3]:.1f} %" in tokens.nth(3).get_attribute("aria-label")
    assert re.search(r"\d+ \+ 24 tokens · .*tokens/s · first after", page.inner_text(".stats"))

    card = page.locator("#card")
    tokens.nth(3).hover()
    assert [row.strip() for row in card.locator("li code").all_text_contents()] == [
        shown(text) for text in expected["logprobs"]["top_logprobs"][3]
    ]
    assert f"{percents[3]:.1f} %" in card.inner_text()
    page.mouse.move(5, 5)
    card.wait_for(state="hidden")

    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    assert tokens.nth(1).evaluate("token => token === document.activeElement")
    assert shown(expected["logprobs"]["tokens"][1]) in card.inner_text()
    page.keyboard.press("End")
    assert tokens.last.evaluate("token => token === document.activeElement")
    page.keyboard.press("Escape")
    assert card.is_hidden()


def shown(text: str) -> str:
    """A token as the card shows it."""
    blanks = len(text) - len(text.lstrip(" "))
    return "␣" * blanks + text[blanks:].replace("\n", "↵")


def test_chat_stops_and_is_kept(visit, slow):
    """Escape ends the request in the server too; text and settings outlive a reload, until they are
    cleared."""
    one = visit(slow.url, "chat").ready()
    page = one.page
    one.set(max_tokens=400, seed=3)
    one.send("Say\nsomething")
    playwright.expect(page.locator(".assistant .text")).to_have_text(re.compile(".{10}", re.DOTALL))
    assert page.inner_text("#send") == "Stop"
    assert slow.get("/health")["running"] == 1
    page.keyboard.press("Escape")
    one.ended()
    assert "stopped" in page.locator(".stats").last.inner_text()
    text = one.shown()
    assert len(text) > 10
    slow.wait_until_idle()

    page.reload()
    assert one.shown() == text and page.input_value("#max_tokens") == "400"
    one.click("Edit")
    assert page.input_value("#draft") == "Say\nsomething" and not page.locator(".turn").count()
    page.click("#forget")
    page.reload()
    assert page.input_value("#draft") == "" and page.input_value("#max_tokens") != "400"


@pytest.mark.proof
def test_errors_in_place(visit, server):
    """The server's words, where the answer would be and at the field that they are about."""
    one = visit(server.url).ready()
    page = one.page
    one.set(max_tokens=10**6)
    one.send(PROMPT)
    page.wait_for_selector(".error:visible")
    words = page.inner_text(".turn .error")
    refused = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**6}, status=400)
    assert words == refused["error"]["message"]
    assert page.locator("#max_tokens-error").inner_text() == words
    assert page.locator("#max_tokens[aria-invalid=true]").count() == 1
    one.set(max_tokens=4, seed=1)
    assert page.locator("#max_tokens[aria-invalid=true]").count() == 0
    one.click("Again")
    one.ended()
    assert one.answer()

    one.set(format="schema", schema="{")
    one.send(PROMPT)
    assert page.locator("#schema-error").inner_text().startswith("JSON schema:")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.proof)])
@pytest.mark.proof
def test_on_a_phone(scheme, visit, server):
    """Nothing is wider than 360 pixels, whatever the model writes, and settings cover the page."""
    one = visit(server.url, viewport=PHONE, color_scheme=scheme, has_touch=True).ready()
    page = one.page

    page.click("#open-settings")
    one.set(probabilities=True, max_tokens=20, temperature=0, format="schema")
    assert one.width() <= 360
    assert page.locator("main").evaluate("main => main.inert")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings"
    page.click("#open-settings")
    one.set(format="text")
    page.click("#close-settings")
    one.send("long" * 200 + "\n" + "| a | b " * 40 + PROMPT)
    one.ended()
    page.locator(".turn .token").nth(4).tap()
    page.locator("#card").wait_for()
    assert one.width() <= 360
    box = page.locator("#card").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    outside = one.outside()
    assert not outside


def test_output_is_text(visit, server):
    """Markup that a model writes, in a text, a token, an alternative or an error, is shown."""
    one = visit(server.url).ready()
    logprobs = {
        "tokens": [MARKUP],
        "token_logprobs": [-1.0],
        "top_logprobs": [{MARKUP: -1.0, "<b>": -2.0}],
        "text_offset": [0],
    }
    choice = {"index": 0, "text": MARKUP, "logprobs": logprobs, "finish_reason": None}
    error = {"error": {"message": MARKUP, "type": "server_error", "param": None, "code": None}}
    for probabilities in (True, False):
        one.set(probabilities=probabilities)
        scripted(one, events({"choices": [choice]}, error))
        one.send(MARKUP)
        one.page.locator(".error:visible").last.wait_for()
        one.ended()
        assert one.shown() == MARKUP * 2
        assert one.page.locator(".turn .error").last.inner_text() == MARKUP
        if probabilities:
            one.page.locator(".turn .token").hover()
            assert MARKUP in one.page.locator("#card").inner_text()
    assert one.page.locator(".turn img, .turn script, #card img").count() == 0
    assert one.page.title() != "owned"
    assert_no_markup_is_made(PAGE)


@pytest.mark.proof
def test_key(visit):
    """Asked for where the server wants one, kept for the tab only, sent with each request."""
    with counted_server(key="correct horse") as locked:
        one = visit(locked.url).ready()
        page = one.page
        page.fill("#key", "wrong")
        one.click("Use it")
        page.wait_for_selector("#key-dialog", state="hidden")
        one.set(max_tokens=4, seed=1)
        one.send(PROMPT)
        page.wait_for_selector("#key-dialog")
        assert "key" in page.inner_text("#key-words")
        page.fill("#key", "correct horse")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn .stats:not(:empty)")
        one.ended()
        assert one.answer() and page.locator(".turn").count() == 1
        assert page.locator("#model").input_value() == locked.name
        kept = "JSON.stringify({...localStorage})"
        assert "correct horse" not in page.evaluate(kept)
        assert "correct horse" in page.evaluate(kept.replace("local", "session"))


@pytest.mark.proof
def test_copied_as_curl(visit, server):
    """The command, run by a shell, gets the page's answer."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    one = visit(server.url, permissions=["clipboard-read", "clipboard-write"]).ready()
    one.set(temperature=0, max_tokens=6, stop="never\\n'quoted'")
    text = 'It\'s "quoted" $HOME `date` \\n'
    one.page.fill("#draft", text)
    one.page.click("#curl")
    one.page.wait_for_selector("text=Copied")
    command = one.page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["bash", "-c", f"{command} -sS"], capture_output=True, text=True)
    answer = json.loads(done.stdout)["choices"][0]["text"]
    one.send(text)
    one.ended()
    assert one.answer() == answer


@pytest.mark.proof
def test_copied_without_a_clipboard(visit, server):
    """A page that came from another machine over plain HTTP has none."""
    one = visit(server.url).ready()
    one.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    one.page.fill("#draft", "some words")
    one.page.click("#curl")
    one.page.wait_for_selector("text=Copied")
    one.page.fill("#draft", "")
    one.page.press("#draft", "Control+v")
    assert '"prompt": "some words"' in one.page.input_value("#draft")
    assert one.page.locator("textarea.unseen").count() == 0


@pytest.mark.proof
@pytest.mark.parametrize(
    "status, state, words",
    [("loading", "waiting", "Loading the model"), ("failed", "down", "failed")],
)
def test_a_server_that_is_not_ready(status, state, words, visit, server):
    one = visit(server.url)
    body = json.dumps({"status": status})
    one.page.route("**/health", lambda route: route.fulfill(status=503, body=body))
    one.page.reload()
    one.page.wait_for_selector(f"#health[data-state={state}]")
    assert one.page.inner_text("#health") == words


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_characters_of_several_tokens(mode, visit, server):
    """Are shown whole, by the token that completes them; the ones before show their bytes."""
    one = visit(server.url, mode).ready()
    one.set(probabilities=True)
    pieces = [b"a ", "😀".encode()[:2], "😀".encode()[2:], "é".encode()]
    texts = ["a ", "", "😀", "é"]

    def name(piece: bytes) -> str:
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def chunk(piece: bytes, text: str) -> dict:
        if mode == "chat":
            token = {"token": piece.decode("utf-8", "replace"), "logprob": -1, "bytes": list(piece)}
            content = [{**token, "top_logprobs": [token]}]
            choice = {"delta": {"content": text}, "logprobs": {"content": content}}
        else:
            listed = {"tokens": [name(piece)], "token_logprobs": [-1], "text_offset": [0]}
            choice = {"text": text, "logprobs": {**listed, "top_logprobs": [{name(piece): -1}]}}
        return {"choices": [choice]}

    scripted(one, events(*map(chunk, pieces, texts)))
    one.send("x")
    one.ended()
    assert one.answer() == "a 😀é"
    assert one.page.locator("#turns .token").all_text_contents() == ["a ", "f0 9f", "😀", "é"]
    one.page.locator("#turns .token").nth(1).hover()
    assert "f0 9f" in one.page.inner_text("#card")


@pytest.mark.proof
def test_the_prompt_has_probabilities_too(visit, server):
    """Nothing new is needed for that: 0 tokens score a text."""
    one = visit(server.url).ready()
    one.set(probabilities=True, echo=True, max_tokens=0)
    one.send(PROMPT)
    one.ended()
    tokens = one.page.locator("#turns .token.in-prompt")
    assert "".join(tokens.all_text_contents()) == PROMPT == one.shown()
    assert "not scored" in tokens.first.get_attribute("aria-label")
    assert "%" in tokens.nth(1).get_attribute("aria-label")


@pytest.mark.proof
def test_what_breaks_is_said(visit):
    """A connection that ends early, and a server that has gone, after which the page recovers."""
    with counted_server() as running:
        one = visit(running.url).ready()
        scripted(one, 'data: {"choices": [{"text": "half"}]}\n\n')
        one.send(PROMPT)
        one.ended()
        assert one.answer() == "half"
        assert "ended before" in one.page.inner_text(".turn .error")
        one.page.unroute(COMPLETIONS)
    one.send(PROMPT)
    one.page.wait_for_selector("#health[data-state=down]")
    assert "does not answer" in one.page.locator(".turn .error").last.inner_text()
    one.complaints = [words for words in one.complaints if "ERR_CONNECTION" not in words]


@pytest.mark.proof
def test_a_short_model(visit, server):
    """Half of its positions are left to the prompt, unless the user has chosen otherwise."""
    one = visit(server.url)
    body = json.dumps({"data": [{"id": "short", "max_model_len": 64}]})
    one.page.route("**/v1/models", lambda route: route.fulfill(body=body))
    one.page.reload()
    one.ready()
    playwright.expect(one.page.locator("#max_tokens")).to_have_value("32")
    one.set(max_tokens=50)
    one.page.reload()
    one.ready()
    assert one.page.input_value("#max_tokens") == "50"


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["json", "schema", "regex"])
def test_constraints(kind, visit, server):
    one = visit(server.url).ready()
    one.set(format=kind, max_tokens=60, seed=1)
    if kind == "regex":
        one.set(regex="(yes|no), [0-9]{3}")
    one.send("Answer: ")
    one.ended()
    if kind == "regex":
        assert re.fullmatch("(yes|no), [0-9]{3}", one.answer())
    else:
        assert one.answer().lstrip().startswith("{")


@pytest.mark.proof
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme, visit, server):
    """Text on each of its grounds has the 4.5 of WCAG AA, borders of fields have 3."""
    one = visit(server.url).ready()
    one.set(probabilities=True, max_tokens=40, seed=1)
    page = one.page
    while scheme not in page.locator("#theme").get_attribute("aria-label"):
        page.click("#theme")
    one.send(PROMPT)
    one.ended()
    one.set(max_tokens=10**6)
    one.send(PROMPT)
    page.wait_for_selector(".error:visible")
    found = one.contrasts()
    assert len(found) > 40
    low = [item for item in found if item[0] < 4.5]
    assert not low
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == scheme


@pytest.mark.proof
def test_by_keyboard_alone(visit, server):
    """Every control has a name and is reached by the tab key, with a ring that is seen."""
    one = visit(server.url).ready()
    page = one.page
    one.set(probabilities=True, max_tokens=8, seed=1)
    one.send(PROMPT)
    one.ended()
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(() => { const one = document.activeElement, style = getComputedStyle(one);"
                " const ring = one.id === 'draft' || ['radio', 'textarea'].includes(one.type)"
                "   || style.outlineStyle !== 'none';"
                " const name = one.matches('.token') ? 'a token' : one.id || one.textContent;"
                " return [one === document.body ? '' : name, ring]; })()"
            )
        )
    names = [name for name, _ in reached]
    wanted = ("model", "theme", "draft", "send", "new", "curl", "temperature", "forget", "Copy")
    assert set(wanted) <= set(names), names
    assert not [name for name, ring in reached if name and not ring]
    assert "a token" in names and ("a token", "a token") not in zip(names, names[1:], strict=False)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input:not([type=range]), select, textarea')].filter(one =>"
        " !one.labels?.length && !one.ariaLabel).map(one => one.id)"
    )
    assert not unnamed


@pytest.mark.skipif(not SHOTS, reason="MEGATRON_SHOTS names no folder for pictures")
def test_pictures(visit, server):
    folder = Path(SHOTS or "")
    folder.mkdir(parents=True, exist_ok=True)

    def take(one: Visit, name: str) -> None:
        one.page.wait_for_timeout(150)
        one.page.screenshot(path=folder / f"generation-{name}.png")

    def completion(**context) -> Visit:
        one = visit(server.url, **context).ready()
        if context["viewport"]["width"] < 900:
            one.page.click("#open-settings")
        one.set(probabilities=True, max_tokens=60, seed=4)
        if context["viewport"]["width"] < 900:
            one.page.click("#close-settings")
        one.send(PROMPT)
        one.ended()
        return one

    small = {"width": 1040, "height": 640}
    light = completion(viewport=small, color_scheme="light")
    light.page.locator("#turns .token.level-2").nth(1).hover()
    take(light, "probabilities")
    light.page.mouse.move(5, 5)
    light.set(max_tokens=5000)
    light.click("Again")
    light.page.wait_for_selector(".error:visible")
    take(light, "error")
    dark = visit(server.url, "chat", viewport=small, color_scheme="dark").ready()
    dark.set(max_tokens=60, seed=5)
    dark.send("What is in a checkpoint?")
    dark.ended()
    dark.send("And how do I load it on two GPUs?")
    dark.ended()
    take(dark, "chat-dark")
    phone = completion(viewport=PHONE, color_scheme="light", device_scale_factor=1.5)
    take(phone, "phone")
