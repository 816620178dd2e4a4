"""The page of runs, in a browser.

    MEGATRON_SHOTS=docs/pictures pytest tests/e2e/test_dashboard_page.py -k pictures

writes the pictures of the guide.
"""

import csv
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

from browser import MARKUP, PHONE, SHOTS, Visit, assert_no_markup_is_made, chromium  # noqa: E402
from dashboards import BATCH, LENGTH, dashboard, row, train_row, write_record, write_run  # noqa: E402

from megatron.apps.dashboard.export import export  # noqa: E402
from megatron.apps.dashboard.runs import WatchedRun, find_runs  # noqa: E402

PAGE = Path(__file__).parents[2] / "megatron/apps/dashboard/page"
SPIKE = 1234
LOSS = "figure:has(h3:text-is('Training loss'))"


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[str]:
    """Four runs as the command gets them; one has a spike, one has broken lines."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("baseline", "wider", "deeper", "warm-up")
    paths = [folder / name / "metrics.jsonl" for name in names]
    for seed, path in enumerate(paths):
        spike = SPIKE if seed == 1 else None
        write_run(path, 2000 + 300 * seed, seed, spike, broken=3 * (seed == 2))
        values = {"model__num_layers": 12 + 12 * (seed == 2), "optimizer__lr": 3e-4}
        write_record(path, model__hidden_size=768 + 256 * (seed == 1), **values)
    return [f"{name}={path}" for name, path in zip(names, paths, strict=True)]


@pytest.fixture(scope="module")
def one_run(runs) -> Iterator[str]:
    with dashboard(runs[1]) as url:
        yield url


@pytest.fixture(scope="module")
def four_runs(runs) -> Iterator[str]:
    with dashboard(*runs) as url:
        yield url


@pytest.fixture
def visit(browser):
    """Opens pages, and checks when the test is over that no script failed and nothing was asked of
    another machine."""
    visits = []

    def opened(url: str, runs: int = 1, **context) -> Visit:
        visits.append(Visit(browser, url, **context))
        page = visits[-1].page
        page.wait_for_selector("figure.chart[aria-busy=false] canvas")
        if runs > 1:  # the page shows each as soon as it is read
            playwright.expect(page.locator(f"{LOSS} .values .label")).to_have_count(runs)
        return visits[-1]

    yield opened
    for one in visits:
        one.close()


def settled(one: Visit) -> None:
    """Waits until the charts that are seen have their data."""
    one.page.wait_for_timeout(400)
    one.page.wait_for_selector(f"{LOSS}[aria-busy=false] canvas")


def hover(one: Visit, share: float, chart: str = LOSS) -> str:
    """Points at a part of a chart's width; what is said of the position."""
    box = one.page.locator(f"{chart} .u-over").bounding_box()
    across = min(share * box["width"], box["width"] - 1)
    one.page.mouse.move(box["x"] + across, box["y"] + box["height"] / 2)
    one.page.wait_for_timeout(100)
    return one.page.inner_text("#position")


def drag(one: Visit, start: float, end: float) -> None:
    box = one.page.locator(f"{LOSS} .u-over").bounding_box()
    height = box["y"] + box["height"] / 2
    one.page.mouse.move(box["x"] + start * box["width"], height)
    one.page.mouse.down()
    one.page.mouse.move(box["x"] + (start + end) / 2 * box["width"], height)
    one.page.mouse.move(box["x"] + end * box["width"], height)
    one.page.mouse.up()
    settled(one)


def high(one: Visit) -> float:
    """The upper end of the vertical axis of the training loss."""
    label = one.page.get_attribute(f"{LOSS} .plot", "aria-label")
    return float(re.search(r"from \S+ to ([\d.]+)\.", label)[1])


def steps_of(text: str) -> int:
    return int(re.sub(r"\D", "", text.split("·")[0]))


def test_a_run_and_its_values(visit, one_run):
    """Each kind of value has its chart; the pointer's position is the same in all of them; a part
    is chosen by dragging, and is in the address."""
    one = visit(one_run)
    page = one.page
    titles = page.locator("figure h3").all_inner_texts()
    assert {
        *("Training loss", "Validation loss", "Learning rate", "Gradient norm", "Accuracy"),
        *("Tokens per second and device", "FLOP utilization", "Own time of ranks", "Peak memory"),
        *("Energy", "Cost", "CO₂", "Saving a checkpoint"),
    } <= set(titles)
    assert page.locator(".totals td").count() >= 8

    at = hover(one, 0.5)
    step = steps_of(at)
    assert abs(step - 1150) < 20, at
    value = float(page.inner_text(f"{LOSS} .values output").split("measured ")[1])
    assert abs(value - float(re.search(r'"loss": ([\d.]+)', train_row(step, 1))[1])) < 0.5
    assert page.inner_text("figure:has(h3:text-is('Validation loss')) .values output")

    drag(one, 0.4, 0.6)
    low, high = (float(re.search(rf"{word}=([\d.]+)", page.url)[1]) for word in ("from", "to"))
    assert abs(low - 920) < 30 and abs(high - 1380) < 30
    assert abs(steps_of(hover(one, 0.5)) - 1150) < 20
    page.reload()
    settled(one)
    assert abs(steps_of(hover(one, 0.0)) - low) < 5
    page.keyboard.press("Escape")
    settled(one)
    assert "from" not in page.url and steps_of(hover(one, 0.0)) < 10


@pytest.mark.proof
def test_a_spike_is_seen(visit, one_run):
    """One step among thousands stays a point of the line, and is a mark with its values."""
    one = visit(f"{one_run}#smooth=0")
    page = one.page
    drawn = page.evaluate(
        "async () => { const runs = await (await fetch('api/runs')).json();"
        " const run = await (await fetch(`api/runs/${runs[0].id}`)).json();"
        " const id = run.series.find(one => one.kind === 'train' && one.name === 'loss').id;"
        " const query = new URLSearchParams({ id, x: 'iteration', points: 100 });"
        " return (await (await fetch(`api/runs/${runs[0].id}/series?${query}`)).json())[id]; }"
    )
    assert max(drawn["y"]) == 30 and len(drawn["x"]) < 1000
    assert drawn["x"][drawn["y"].index(30)] == SPIKE
    words = hover(one, (SPIKE - 1) / 2299)
    assert "Spike" in words and "30" in words, words


@pytest.mark.proof
def test_axes(visit, one_run):
    """Steps, tokens, samples and time; logarithmic ones keep the values."""
    one = visit(one_run)
    page = one.page
    for clock, factor in (("tokens", BATCH * LENGTH), ("samples", BATCH)):
        page.select_option("#x", clock)
        settled(one)
        assert abs(steps_of(hover(one, 0.5)) / factor - 1150) < 20
    assert high(one) > 30
    page.keyboard.press("o")
    assert high(one) < 12 and "cut=1" in page.url
    page.select_option("#x", "seconds")
    settled(one)
    assert re.search(r"time 7 min 4\d s|time 7 min 5\d s", hover(one, 0.5))
    page.keyboard.press("x")
    page.locator(f"{LOSS} .plot").hover()
    page.keyboard.press("l")
    settled(one)
    assert page.get_attribute(f"{LOSS} figcaption button", "aria-pressed") == "true"
    assert "log=" in page.url and abs(steps_of(hover(one, 0.5)) - 1150) < 20


def test_runs_compared(visit, four_runs):
    """Four runs share charts, each with its colour; each is hidden and shown; broken lines are
    counted; configurations and texts stand next to each other."""
    one = visit(four_runs, 4)
    page = one.page
    labels = page.locator(f"{LOSS} .values .label")
    assert labels.all_inner_texts() == ["baseline", "wider", "deeper", "warm-up"]
    colours = page.locator(f"{LOSS} .values .swatch").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(colours)) == 4
    assert "3 broken lines passed over" in page.inner_text("#runs li:nth-child(3)")
    page.keyboard.press("2")
    playwright.expect(labels).to_have_text(["baseline", "deeper", "warm-up"])
    page.reload()
    playwright.expect(labels).to_have_text(["baseline", "deeper", "warm-up"])
    page.keyboard.press("t")
    assert page.locator("#events tbody tr").count() > 20
    page.keyboard.press("t")
    playwright.expect(page.locator("#texts dd").first).to_have_text("after 2000 steps")
    assert page.locator("#texts dt").count() == 4


def test_a_live_run(visit, browser, tmp_path):
    """What is written is drawn soon, also after half a line, in the plots that are there."""
    path = write_run(tmp_path / "live" / "metrics.jsonl", 300)
    with dashboard(path) as url:
        one = visit(url)
        page = one.page
        canvas = page.locator(f"{LOSS} canvas").element_handle()
        assert abs(steps_of(hover(one, 1.0)) - 300) < 5
        line = train_row(400)
        with path.open("a") as file:
            file.write("".join(train_row(step) for step in range(301, 400)) + line[:40])
        playwright.expect(page.locator(".far")).to_contain_text("399")
        with path.open("a") as file:
            file.write(line[40:] + row("save", 400, seconds=1.0))
        playwright.expect(page.locator(".far")).to_contain_text("400")
        deadline = time.monotonic() + 10
        while steps_of(hover(one, 1.0)) < 395 and time.monotonic() < deadline:
            page.mouse.move(5, 5)
        assert steps_of(hover(one, 1.0)) >= 395
        assert canvas.evaluate("canvas => canvas.isConnected")


@pytest.mark.proof
def test_exports(visit, one_run):
    """A picture with title and legend; a table with every row of what is seen."""
    one = visit(one_run)
    drag(one, 0.4, 0.6)
    with one.page.expect_download() as saved:
        one.page.click(f"{LOSS} button:text-is('PNG')")
    picture = Path(saved.value.path()).read_bytes()
    assert saved.value.suggested_filename == "training-loss.png"
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    with one.page.expect_download() as saved:
        one.page.click(f"{LOSS} button:text-is('CSV')")
    table = list(csv.DictReader(io.StringIO(Path(saved.value.path()).read_text())))
    steps = [int(entry["iteration"]) for entry in table]
    assert steps == list(range(steps[0], steps[-1] + 1)) and 400 < len(steps) < 520
    name = next(column for column in table[0] if "loss" in column)
    written = float(re.search(r'"loss": ([\d.]+)', train_row(steps[0], 1))[1])
    assert float(table[0][name]) == pytest.approx(written, rel=1e-6)


def test_texts_of_runs_are_no_markup(visit, tmp_path):
    path = write_run(tmp_path / "metrics.jsonl", 40)
    with path.open("a") as file:
        file.write(row(f"validation {MARKUP}", 40, loss=2.0))
        file.write(row("text", 40, prompt=MARKUP, answer=MARKUP, reference=MARKUP, ended=True))
        file.write(row(f"odd {MARKUP}", 40, value=1.0))
    with dashboard(f"<b onload>{MARKUP.partition('=')[0]}={path}") as url:
        one = visit(url)
        page = one.page
        page.keyboard.press("t")
        page.keyboard.press("t")
        playwright.expect(page.locator("#texts h3")).to_have_text(MARKUP)
        assert page.locator("main img, main script, aside img, aside script").count() == 0
        assert page.title() != "owned"
    assert_no_markup_is_made(PAGE)


@pytest.mark.proof
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(scheme, visit, four_runs):
    """Nothing is wider than 360 pixels; a finger reads values."""
    one = visit(four_runs, 4, viewport=PHONE, color_scheme=scheme, has_touch=True)
    page = one.page
    for tab in ("charts", "events", "texts", "configuration"):
        page.check(f"[name=tab][value={tab}]", force=True)
        page.wait_for_timeout(200)
        assert one.width() <= 360, tab
    page.check("[name=tab][value=charts]", force=True)
    assert not one.outside()
    settled(one)
    page.locator(f"{LOSS} .u-over").tap()
    playwright.expect(page.locator("#position")).to_be_visible()


@pytest.mark.proof
def test_fingers(visit, one_run):
    """One goes along the curve, two apart show less of it."""
    one = visit(one_run, viewport=PHONE, has_touch=True)
    page = one.page
    page.locator(LOSS).scroll_into_view_if_needed()
    box = page.locator(f"{LOSS} .u-over").bounding_box()
    session = one.context.new_cdp_session(page)

    def touch(kind: str, *shares: float) -> None:
        height = box["y"] + box["height"] / 2
        points = [
            {"x": box["x"] + share * box["width"], "y": height, "id": number}
            for number, share in enumerate(shares)
        ]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.wait_for_timeout(100)

    touch("touchStart", 0.25)
    assert abs(steps_of(page.inner_text("#position")) - 575) < 20
    touch("touchMove", 0.5)
    touch("touchMove", 0.75)
    assert abs(steps_of(page.inner_text("#position")) - 1725) < 20
    touch("touchEnd")
    touch("touchStart", 0.4, 0.6)
    touch("touchMove", 0.2, 0.8)
    touch("touchEnd")
    settled(one)
    low, high = (float(re.search(rf"{word}=([\d.]+)", page.url)[1]) for word in ("from", "to"))
    assert abs(low - 767) < 60 and abs(high - 1533) < 60


@pytest.mark.proof
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme, visit, four_runs):
    """Text has the 4.5 of WCAG AA on its ground, the colours of runs have 3."""
    one = visit(four_runs, 4, color_scheme=scheme)
    for _ in range(4):
        found = one.contrasts()
        assert len(found) > 15
        assert not [item for item in found if item[0] < 4.5]
        one.page.keyboard.press("t")
        one.page.wait_for_timeout(300)


@pytest.mark.proof
def test_by_keyboard(visit, four_runs):
    """The help lists the keys; arrows read values aloud; every control has a name."""
    one = visit(four_runs, 4)
    page = one.page
    page.keyboard.press("?")
    assert page.locator("#help").is_visible() and page.locator("#keys dt").count() > 10
    page.keyboard.press("Escape")
    page.locator(f"{LOSS} .plot").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert re.match(r"step [2-9]: baseline .*warm-up ", page.text_content("#announcer"))
    page.keyboard.press("+")
    settled(one)
    assert "from=" in page.url
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, button, [tabindex=\"0\"]')].filter(one =>"
        " !one.labels?.length && !one.ariaLabel && !one.textContent.trim())"
        ".map(one => one.outerHTML)"
    )
    assert not unnamed


@pytest.mark.proof
def test_nothing_to_draw(browser, tmp_path):
    """A run without rows, and a file of something else, say so; a first row is drawn."""
    for name, content in (("empty", ""), ("other", "hello\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(content)
    with dashboard(tmp_path) as url:
        one = Visit(browser, url)
        playwright.expect(one.page.locator("#charts .note")).to_have_text("No values yet.")
        error = one.page.locator(".run[data-state=error] .trouble")
        playwright.expect(error).to_contain_text("none of the 1 lines")
        (tmp_path / "empty" / "metrics.jsonl").write_text(train_row(1))
        one.page.wait_for_selector("figure.chart[aria-busy=false] canvas")
        assert not one.page.locator("#charts > .note").count()
        one.close()


@pytest.mark.proof
def test_a_server_that_has_gone(visit, runs):
    with dashboard(runs[0]) as url:
        one = visit(url)
    one.page.wait_for_selector("#health[data-state=down]")
    assert one.page.locator(f"{LOSS} canvas").is_visible()
    one.complaints = [words for words in one.complaints if "ERR_" not in words]


@pytest.mark.proof
def test_a_server_that_is_back(visit, runs):
    """A chart that was asked for meanwhile is drawn then, also where the run is as it was."""
    last = "figure.chart >> nth=-1"
    with dashboard(runs[0]) as url:
        first = visit(url)  # makes the index, whose run has another version
        first.page.close()
    with dashboard(runs[0]) as url:
        one = visit(url)
    page = one.page
    page.wait_for_selector("#health[data-state=down]")
    page.locator(last).scroll_into_view_if_needed()
    playwright.expect(page.locator(f"{last} >> .note")).to_have_text("The server does not answer.")
    with dashboard(runs[0], port=int(url.rstrip("/").rpartition(":")[2])):
        page.wait_for_selector("#health[data-state=up]")
        page.wait_for_selector(f"{last} >> canvas")
        playwright.expect(page.locator(f"{last} >> .note")).to_be_hidden()
    one.complaints = [words for words in one.complaints if "ERR_" not in words]


@pytest.mark.proof
@pytest.mark.parametrize(
    "tab",
    ["configuration", "events", "texts"],
)
def test_what_is_unchanged_is_not_drawn_again(tab, visit, tmp_path):
    """Text that is selected stays so while a run writes rows."""
    path = write_run(tmp_path / "metrics.jsonl", 300)
    start = tmp_path / "run" / "1"
    start.mkdir(parents=True)
    (start / "record.json").write_text(json.dumps({"start": 1, "command": ["train"]}))
    (start / "config.json").write_text(json.dumps({"model": {"num_layers": 2}}))
    with dashboard(path) as url:
        one = visit(f"{url}#tab=charts")
        page = one.page
        page.check(f"[name=tab][value={tab}]", force=True)
        cell = page.locator(f"#{tab} :is(td, dd)").first
        cell.wait_for()
        shown = cell.element_handle()
        shown.evaluate("cell => getSelection().selectAllChildren(cell)")
        selected = page.evaluate("String(getSelection())")
        for step in (301, 302):
            with page.expect_response(re.compile(r"/api/runs/1$")), path.open("a") as file:
                file.write(train_row(step))
            page.wait_for_timeout(300)
        assert selected and page.evaluate("String(getSelection())") == selected
        assert shown.evaluate("cell => cell.isConnected")


SEEDS, RATES = (1, 2, 3), (1e-4, 3e-4)
ENDS = ("the end of its plan", "RuntimeError: CUDA out of memory", "SIGTERM", None, None, None)


def loss_of(rate: float, seed: int, step: int) -> float:
    return 2.0 + 1000 * rate + 0.1 * seed**2 + 1 / step


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> Path:
    """Runs of two learning rates with three seeds each, which ended in different ways."""
    folder = tmp_path_factory.mktemp("seeds")
    pairs = [(rate, seed) for rate in RATES for seed in SEEDS]
    for (rate, seed), end in zip(pairs, ENDS, strict=True):
        path = folder / f"rate{rate:g}-s{seed}" / "metrics.jsonl"
        path.parent.mkdir()
        ranks = {"own_seconds_rank_0": 0.3, "own_seconds_rank_1": 0.2, "gpu_utilization": 97.0}
        losses = [loss_of(rate, seed, step) for step in range(1, 41)]
        steps = [train_row(step, loss=loss, **ranks) for step, loss in enumerate(losses, 1)]
        path.write_text("".join(steps) + row("test", 40, loss=2.5))
        values = {"optimizer__lr": rate, "model__num_layers": 12, "training__seed": seed}
        write_record(path, end=end, **values, checkpoint__save=str(path.parent))
        if (rate, seed) == pairs[-1]:
            os.utime(path, (1e9, 1e9))
    return folder


@pytest.mark.proof
def test_runs_are_filtered_sorted_and_grouped(visit, seeds):
    with dashboard(seeds) as url:
        one = visit(f"{url}#smooth=0")
        page = one.page
        states = page.locator(".run .state").all_inner_texts()
        assert states[:3] == [
            "finished",
            "failed: RuntimeError: CUDA out of memory",
            "stopped: SIGTERM",
        ]
        assert states[3:5] == ["running"] * 2 and re.fullmatch(r"no rows for \d+ days", states[5])
        playwright.expect(page.locator("#health")).to_have_text("Live: 2 of 6")

        headings = page.locator(".totals thead th").all_inner_texts()
        assert headings[:4] == ["Run", "Training loss", "Test loss", "lr"]
        assert not {"seed", "save", "num_layers"}.intersection(headings)
        page.click(".totals [data-key='Training loss']")
        page.click(".totals [data-key='Training loss']")
        first = page.locator(".totals tbody th").first
        playwright.expect(first).to_have_text("rate0.0003-s3")
        assert page.locator(".totals [aria-sort=descending]").count() == 1 and "sort=" in page.url
        page.click("#columns summary")
        page.check("#column-choice label[title='training.seed'] input")
        assert "seed" in page.locator(".totals thead").inner_text()

        page.fill("#filter", "lr>0.0002 seed!=2")
        playwright.expect(page.locator(".run")).to_have_count(2)
        playwright.expect(page.locator(".totals tbody tr")).to_have_count(2)
        page.fill("#filter", "failed")
        playwright.expect(page.locator(".run .name")).to_have_text(["rate0.0001-s2"])
        page.fill("#filter", "nothing")
        playwright.expect(page.locator("#no-runs")).to_be_visible()
        page.fill("#filter", "")

        page.check("#group")
        playwright.expect(page.locator(".totals tbody tr")).to_have_count(2)
        labels = page.locator(f"{LOSS} .values .label")
        playwright.expect(labels).to_have_text(["rate0.0001 (3 runs)", "rate0.0003 (3 runs)"])
        shown = page.locator(f"{LOSS} .values output").first.inner_text()
        values = [loss_of(RATES[0], seed, 40) for seed in SEEDS]
        mean, low, high = map(float, re.findall(r"[\d.]+", shown))
        assert mean == pytest.approx(sum(values) / 3, abs=1e-3)
        assert (low, high) == pytest.approx((min(values), max(values)), abs=1e-3)

        page.check("[name=tab][value=configuration]", force=True)
        rows = page.locator("#configuration tbody th").all_inner_texts()
        assert rows[0] == "optimizer.lr" and "model.num_layers" not in rows
        table = page.locator("#configuration table").bounding_box()
        assert table["y"] < page.locator(".record").first.bounding_box()["y"]
        assert page.locator("#configuration .wide").bounding_box()["y"] < 300


@pytest.mark.proof
def test_a_run_names_its_losses(visit, seeds):
    with dashboard(seeds / "rate0.0001-s1") as url:
        page = visit(url).page
        playwright.expect(page.locator("#health")).to_have_text("Connected")
        playwright.expect(page.locator(f"{LOSS} .values")).to_contain_text(
            re.compile(r"trainingmean [\d.]+ · measured [\d.]+")
        )
        test = page.locator("figure:has(h3:text-is('Test loss'))")
        test.scroll_into_view_if_needed()
        playwright.expect(test.locator(".values")).to_have_text("test2.5")
        titles = page.locator("figure h3").all_inner_texts()
        assert {"Power", "Slowest rank", "Own time of ranks", "Gpu utilization"} <= set(titles)
        ranks = page.locator("section[aria-label=Ranks] figure:has(h3:text-is('Own seconds'))")
        ranks.scroll_into_view_if_needed()
        playwright.expect(ranks.locator(".label")).to_have_text(["rank 0", "rank 1"])


def test_a_saved_page_needs_nothing_else(browser, tmp_path, seeds):
    """One file, opened without a server; names and texts of runs are no markup in it."""
    path = tmp_path / "odd" / "metrics.jsonl"
    write_run(path, 300, spike=123)
    with path.open("a") as file:
        file.write(row("text", 300, prompt=f"</script>{MARKUP}<!--", answer=MARKUP, ended=True))
    words = [f"{MARKUP.replace('/', ' ').replace('=', ' ')}={path}", str(seeds / "rate0.0001-s1")]
    watched = [WatchedRun(str(n), *found) for n, found in enumerate(find_runs(words), 1)]
    for run in watched:
        run.refresh()
        run.close()
    saved = tmp_path / "saved.html"
    saved.write_bytes(export(watched))
    one = Visit(browser, saved.as_uri())
    page = one.page
    page.wait_for_selector(f"{LOSS}[aria-busy=false] canvas")
    playwright.expect(page.locator("#health")).to_have_text("Saved page")
    assert page.locator("#save").is_hidden() and high(one) >= 30
    page.select_option("#x", "tokens")
    page.wait_for_selector(f"{LOSS}[aria-busy=false] canvas")
    page.wait_for_timeout(300)
    assert abs(steps_of(hover(one, 1.0)) - 300 * BATCH * LENGTH) < 3 * BATCH * LENGTH
    with page.expect_download() as download:
        page.click(f"{LOSS} button:text-is('CSV')")
    table = Path(download.value.path()).read_text().splitlines()
    assert table[0] == "tokens,loss" and len(table) >= 40
    for tab in ("events", "texts", "configuration"):
        page.check(f"[name=tab][value={tab}]", force=True)
        page.wait_for_timeout(100)
    assert page.locator("main img, aside img, main script").count() == 0
    assert page.title() == "2 runs"
    one.asked = [url for url in one.asked if not url.startswith("data:")]
    one.close()


@pytest.mark.proof
def test_an_odd_address_shows_the_page(visit, one_run):
    one = visit(f"{one_run}#log=50%25&off=%25zz")
    assert one.page.locator(f"{LOSS} canvas").is_visible()


@pytest.mark.skipif(not SHOTS, reason="MEGATRON_SHOTS names no folder for pictures")
def test_pictures(visit, one_run, four_runs, seeds):
    from PIL import Image

    folder = Path(SHOTS or "")
    folder.mkdir(parents=True, exist_ok=True)

    def take(name: str, url: str, pointed: float = 0.6, **context) -> None:
        one = visit(url, **context)
        settled(one)
        hover(one, pointed)
        path = folder / f"dashboard-{name}.png"
        one.page.screenshot(path=path)
        Image.open(path).convert("RGB").quantize(200).save(path, optimize=True)  # a third as large

    small = {"width": 1180, "height": 760}
    take("one", one_run, (SPIKE - 1) / 2299, viewport=small)
    take("four", f"{four_runs}#cut=1", viewport=small)
    take("dark", four_runs, viewport=small, color_scheme="dark")
    with dashboard(seeds) as url:
        take("seeds", f"{url}#group=1&sort=-Training+loss", viewport=small)
    take("phone", one_run, viewport=PHONE, has_touch=True, device_scale_factor=1.5)
