"""Runs in a terminal."""

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.apps.dashboard import follow as module
from megatron.apps.dashboard.follow import follow, printable, report, sparkline
from megatron.apps.dashboard.runs import POWER, WatchedRun
from megatron.training.registry import METRICS

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from dashboards import row, train_row, write_run  # noqa: E402


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "metrics.jsonl", 300, spike=200)
    with path.open("a") as file:
        file.write(row("spike \x1b[31m", 300, loss=1.0) + train_row(301, seconds_left=7321.0))
    opened = WatchedRun("1", "a [red]run\x1b[2J", path)
    opened.refresh()
    yield opened
    opened.close()


def after(count: int, then=lambda: None):
    """Waits so often, does something the first time, and interrupts."""
    waited = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        then()
        if len(waited) == count:
            raise KeyboardInterrupt

    return wait


def test_a_line_for_new_steps_where_no_terminal_is(run):
    stream = io.StringIO()

    def write() -> None:
        with run.path.open("a") as file:
            if stream.getvalue().count("\n") == 1:
                file.write(train_row(302))

    with pytest.raises(KeyboardInterrupt):
        follow([run], stream, wait=after(3, write))
    first, second = stream.getvalue().splitlines()
    assert "step 301 |" in first and "2 h 2 min left" in first and "loss " in first
    assert "step 302 |" in second and "\x1b" not in stream.getvalue()


def test_a_picture_in_a_terminal(run, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt):
        follow([run], stream, wait=after(1))
    text = stream.getvalue()
    assert "a [red]run?[2J | live" in text and "gradient norm" in text and "█" in text


@pytest.mark.parametrize("width", [40, 120])
def test_a_report_fits_and_shows_the_spike(width, run):
    lines = report(run, width)
    assert all(len(line) <= width for line in lines)
    loss = next(line for line in lines if line.lstrip().startswith("training loss"))
    assert loss.count("█") == 1 and loss.count("▁") >= width // 20
    assert sum("validation" in line for line in lines) == 3


def test_sparkline():
    x = np.arange(1000.0)
    y = np.zeros(1000)
    y[500] = 1
    assert sparkline(x, y, 10) == "▁▁▁▁█▁▁▁▁▁"
    assert sparkline(x[:1], y[:1], 5) == "▁    "
    assert sparkline(x, np.full(1000, np.nan), 5) == ""
    gap = np.where((x > 300) & (x < 700), np.nan, x)
    assert sparkline(x, gap, 10)[4:6] == "  "
    assert printable("a\x1b[31m\nb") == "a?[31m?b"


def test_terminal_and_page_show_numbers_of_the_registry():
    page = (Path(module.__file__).parent / "page" / "panels.js").read_text()
    table = page.partition("const TRAINING = [")[2].partition("];\nconst SECTIONS")[0]
    lists = re.findall(r"\[\s*((?:\"\w+\",?\s*)+)\]", table)
    names = {name for each in lists for name in re.findall(r"\w+", each)}
    assert len(names) > 20 and names - METRICS.keys() == {POWER}
    assert module._SHOWN.keys() - METRICS.keys() == {"reward"}  # of a feature


def test_reward_leads_where_there_is_one(tmp_path):
    """The loss of texts of the weights in training is nearly 0."""
    path = write_run(tmp_path / "metrics.jsonl", 0)
    with path.open("a") as file:
        file.write(train_row(1, reward=0.75, loss=1e-18))
    run = WatchedRun("1", "a run", path)
    run.refresh()
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        follow([run], stream, wait=after(1))
    assert "reward 0.7500" in stream.getvalue() and "loss" not in stream.getvalue()
    assert [line.split()[0] for line in report(run, 80)[1:3]] == ["reward", "training"]
    run.close()
