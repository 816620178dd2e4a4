"""Counts what training asks of GPUs, on none, and compares it with what is recorded.

    python tests/nullgpu/table.py
    python tests/nullgpu/table.py --cells 'tp2,tp2 sp' --rewrite
    python tests/nullgpu/table.py --tree ../before --json before.json

Needs a CUDA build of torch, Triton and gcc, as `make null-gpu` has them; no GPU. Each cell of
cells.py is a process of its own. The numbers are exact: a difference is a change of the program, or
of torch. Status 1 says that something differs; with --rewrite the record becomes what was counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]

from nullgpu.build import build, missing, variables  # noqa: E402
from nullgpu.cells import CELLS  # noqa: E402

RECORD = HERE / "counts.json"
NEAR = {"peak_gib": 0.02, "reserved_gib": 0.05}
"""Largest share by which a count may differ from the record; others may not."""
SHOWN = (
    "graphs", "breaks", "cuda_launches", "triton_launches", "syncs", "collectives", "exposed",
)  # fmt: skip
TIMEOUT = 1800.0

Counts = dict[str, float]


def count(name: str, tree: Path = ROOT) -> dict[str, Any]:
    """Return ``counts`` of a cell, and the reasons of its graph breaks. Raises RuntimeError with
    the end of what the process said, if it fails."""
    done = subprocess.run(
        [sys.executable, str(HERE / "count.py"), name],
        cwd=tree,
        env=variables(build(), CELLS[name].ranks, tree, os.environ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-1500:]}")
    return json.loads(lines[-1])


def differences(found: Counts, recorded: Counts) -> list[str]:
    """Return in words what is not as recorded; a count that is missing is 0."""
    lines = []
    for name in dict.fromkeys([*recorded, *found]):
        now, before = found.get(name, 0), recorded.get(name, 0)
        if abs(now - before) > NEAR.get(name, 0) * before:
            lines.append(f"{name} is {now:g}, recorded {before:g}")
    return lines


def record() -> dict[str, Any]:
    """Return the recorded counts: ``torch``, the version that they are of, and ``cells``."""
    if not RECORD.is_file():
        return {"torch": None, "cells": {}}
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write(path: Path, cells: Mapping[str, Counts]) -> None:
    """Record counts, one cell a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(cells[name])}" for name in CELLS if name in cells]
    body = ",\n".join(f"  {line}" for line in lines)
    text = f'{{"torch": {json.dumps(version("torch"))}, "cells": {{\n{body}\n}}}}\n'
    path.write_text(text, encoding="utf-8")


def markdown(cells: Mapping[str, Counts], before: Mapping[str, Counts]) -> str:
    """A table of the counts, each after what it was before where that is known and other."""
    head = ["cell", *(name.replace("_", " ") for name in SHOWN), "MB", "exposed MB", "peak GiB"]
    rows = [head, ["---"] * len(head)]
    for name, found in cells.items():
        old = before.get(name, found)
        columns = [_row(counts) for counts in (old, found)]
        rows.append(
            [name, *(a if a == b else f"{a} -> {b}" for a, b in zip(*columns, strict=True))]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(counts: Counts) -> list[str]:
    if "out_of_memory" in counts:
        return ["-"] * (len(SHOWN) + 2) + ["out of memory"]
    exposed = counts.get("exposed_bytes", 0)
    sent = sum(value for name, value in counts.items() if name.endswith("_bytes")) - exposed
    numbers = [f"{counts.get(name, 0):g}" for name in SHOWN]
    megabytes = (f"{value / 1e6:.1f}" for value in (sent, exposed))
    return [*numbers, *megabytes, f"{counts['peak_gib']:.2f}"]


def _count_all(names: Iterable[str], tree: Path, jobs: int) -> dict[str, dict[str, Any] | str]:
    def one(name: str) -> tuple[str, dict[str, Any] | str]:
        try:
            found: dict[str, Any] | str = count(name, tree)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = str(error)
        said = found if isinstance(found, str) else f"{name}: counted"
        print(said, file=sys.stderr, flush=True)
        return name, found

    with ThreadPoolExecutor(jobs) as pool:
        return dict(pool.map(one, names))


def main() -> int:
    """Count, print and compare; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cells", default="", help="only these, with commas between their names")
    add("--tree", type=Path, default=ROOT, help="tree of another version of this project")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="cells at once")
    add("--json", type=Path, help="write the counts here too, as the record is")
    add("--before", type=Path, help="a file of --json, to be shown next to the counts")
    add("--rewrite", action="store_true", help="record what is counted")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        parser.error(reason)
    names = [name for name in options.cells.split(",") if name] or list(CELLS)
    unknown = [name for name in names if name not in CELLS]
    if unknown:
        parser.error(f"--cells {', '.join(unknown)}: there are {', '.join(CELLS)}")
    build()
    results = _count_all(names, options.tree.resolve(), options.jobs)
    cells = {name: each["counts"] for name, each in results.items() if not isinstance(each, str)}
    before = json.loads(options.before.read_text())["cells"] if options.before else {}
    print(markdown(cells, before))
    for name, each in results.items():
        for line in [each] if isinstance(each, str) else each["reasons"]:
            print(f"{name}: {line}")
    if options.json:
        write(options.json, cells)
    known = record()
    if options.rewrite:
        write(RECORD, known["cells"] | cells)
        return int(len(cells) < len(results))
    if known["torch"] != version("torch"):
        print(f"recorded with torch {known['torch']}, this is {version('torch')}")
    wrong = {
        name: differences(found, known["cells"].get(name, {})) for name, found in cells.items()
    }
    for name, lines in wrong.items():
        for line in lines:
            print(f"{name}: {line}")
    return int(len(cells) < len(results) or any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
