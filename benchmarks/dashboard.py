#!/usr/bin/env python
"""Time until the page of tools/dashboard.py shows the first chart of a long run.

    python benchmarks/dashboard.py --steps 1000000

Writes a run of so many steps, opens the page in chromium for the first time, when the index is
made, and five more times, each with a dashboard of its own. Needs playwright and chromium.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "e2e")]

from browser import Visit, chromium  # noqa: E402
from dashboards import dashboard, row, train_row  # noqa: E402

CHART = "figure.chart[aria-busy=false] canvas"
OPENINGS = 5


def write(path: Path, steps: int) -> None:
    """A run whose numbers repeat every thousand steps; its loss has one spike."""

    rows = [json.loads(train_row(step)) for step in range(1, 1001)]
    with path.open("w") as file:
        for step in range(1, steps + 1):
            again = rows[step % 1000]
            again["iteration"], again["consumed_samples"] = step, 64 * step
            again["consumed_tokens"] = 16384 * step
            again["loss"] = 30.0 if step == steps // 2 else 2.0 + 1 / step
            file.write(json.dumps(again) + "\n")
            if step % 1000 == 0:
                file.write(row("validation", step, loss=2.0))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        path = Path(folder) / "metrics.jsonl"
        write(path, steps)
        print(f"{steps:,} steps, {path.stat().st_size / 1e6:.0f} MB")
        begin = time.perf_counter()
        with dashboard(path) as url:
            one = Visit(browser, url)
            one.page.wait_for_selector(CHART, timeout=300_000)
            print(f"first opening {time.perf_counter() - begin:.1f} s")
            one.close()
        commands, pages = [], []
        for _ in range(OPENINGS):
            begin = time.perf_counter()
            with dashboard(path) as url:
                ready = time.perf_counter()
                one = Visit(browser, url)
                one.page.wait_for_selector(CHART)
                end = time.perf_counter()
                one.close()
            commands.append(end - begin)
            pages.append(end - ready)
        words = ("from the command", commands), ("from the page", pages)
        for name, seconds in words:
            shown = ", ".join(f"{each:.2f}" for each in sorted(seconds))
            print(f"{name} {statistics.median(seconds):.2f} s, median of {shown}")


if __name__ == "__main__":
    main()
