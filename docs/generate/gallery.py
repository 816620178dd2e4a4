"""The gallery: every small run of the recipes with its configuration and its log.

    python docs/generate/gallery.py --run NAME ...   trains at small size, and keeps what was seen
    python docs/generate/gallery.py                  writes docs/recipes/gallery.md from that

What is kept is in ``runs.json`` next to the scripts. A run reads the data of recipes.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes import BAND, BY_NAME, FOLDER, PAGES, Recipe, SmallData, curves, outside, train_small

from megatron.training.writers import read_metrics

RUNS = FOLDER / "runs.json"
PAGE = PAGES / "gallery.md"
COLUMNS = {"iteration": "step", "learning_rate": "rate", "grad_norm": "gradient norm"}
"""Columns of a log, but for the value of the curve, and the names that the page gives them."""
PACKAGES = ("python", "torch", "deepspeed", "transformers")


def record_of(recipe: Recipe, folder: Path, data: Path) -> dict[str, Any]:
    """Return what is kept of a run: day, versions, configuration and log.

    Args:
        recipe: that was trained.
        folder: with the run's record and metrics.
        data: folder of its files, of which the gallery shows names alone.
    """
    (path,) = folder.rglob("record.json")
    record = json.loads(path.read_text())
    sections = json.loads((path.parent / "config.json").read_text())
    values = {key: value for each in sections.values() for key, value in each.items()}
    configuration = {
        name: [_short(values[name], folder, data), origin]
        for name, origin in record["given"].items()
        if name in values and origin != "derived"
    }
    (metrics,) = folder.rglob("metrics.jsonl")
    rows = [row for row in read_metrics(metrics) if row["kind"] == "train"]
    columns = ["iteration", getattr(recipe, "measure", "loss"), *list(COLUMNS)[1:]]
    return {
        "date": record["began"][:10],
        "processes": record["world_size"],
        "versions": {name: record["versions"][name].split()[0] for name in PACKAGES},
        "configuration": configuration,
        "columns": columns,
        "log": [[_rounded(row[column]) for column in columns] for row in rows],
    }


def _short(value: Any, folder: Path, data: Path) -> str:
    """A value as JSON; files in a folder of this machine have their name alone."""
    text = json.dumps(value)
    for known, name in ((folder, "RUNS"), (data, "DATA")):
        text = text.replace(str(known), name)
    return text


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def records() -> dict[str, dict[str, Any]]:
    """Return what is kept, by the names of recipes."""
    return json.loads(RUNS.read_text()) if RUNS.exists() else {}


def _write(kept: Mapping[str, Any]) -> None:
    """A line for each value and each step, so that a diff shows what has changed."""
    text = json.dumps({name: kept[name] for name in BY_NAME if name in kept}, indent=1)
    text = re.sub(r"\[\n[^\[\]{}]*\n *\]", lambda row: re.sub(r"\n *", " ", row[0]), text)
    RUNS.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n")


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    """Lines of text in columns, as a log has them."""
    cells = [[str("" if cell is None else cell) for cell in row] for row in [columns, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )


def _folded(summary: str, text: str) -> str:
    return f"""<details markdown="1">
<summary>{summary}</summary>

<!-- listing -->
```text
{text}
```

</details>"""


def section(recipe: Recipe, run: Mapping[str, Any]) -> str:
    """Return a run's part of the page."""
    log, columns = run["log"], run["columns"]
    values = [
        f"{name} = {value}  ({origin})" for name, (value, origin) in run["configuration"].items()
    ]
    ranks = f"{run['processes']} process{'es' * (run['processes'] > 1)}"
    versions = ", ".join(f"{name} {value}" for name, value in run["versions"].items())
    apart = outside([row[1] for row in log], curves()[recipe.name])
    band = "within its band" if not apart else f"{len(apart)} steps outside its band"
    names = [COLUMNS.get(name, name) for name in columns]
    return f"""## {recipe.title}

![{recipe.title}: {columns[1]} over steps](../pictures/recipe-{recipe.name}.png)

{ranks}, {len(log)} steps, {columns[1]} {log[0][1]:.3f} to {log[-1][1]:.3f}, {band};
{run["date"]}, {versions}.
[Page and script]({recipe.name}.md).

{_folded(f"Configuration: {len(values)} values, each with its origin", chr(10).join(values))}

{_folded(f"Log: {len(log)} steps", _table(names, log))}
"""


def page(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the gallery."""
    parts = "\n".join(section(BY_NAME[name], run) for name, run in kept.items())
    return f"""<!-- Written by docs/generate/gallery.py. -->
# Gallery

The runs of the [recipes](index.md) at small size, on CPUs: the values of the configuration that are
not defaults, and the log of every step. A band is the committed curve, {BAND:.0%} to each side.
Tests train each run again and compare it. `runs.json` next to the scripts has the same for
programs.

{parts}"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="+", choices=BY_NAME, default=[], metavar="NAME")
    options = parser.parse_args()
    kept = records()
    for name in options.run:
        with tempfile.TemporaryDirectory() as folder:
            files, runs = Path(folder, "data"), Path(folder, "runs")
            files.mkdir()
            data = SmallData(Path(os.environ.get("MEGATRON_TEST_DATA", ".")), files)
            train_small(BY_NAME[name], data, keep=runs)
            kept[name] = record_of(BY_NAME[name], runs, files)
        _write(kept)
        print(f"{name}: {len(kept[name]['log'])} steps", flush=True)
    PAGE.write_text(page(records()))


if __name__ == "__main__":
    sys.exit(main())
