"""Plants bugs, one after another, in a copy of this tree, and runs what should catch them.

    python tests/planted/run.py
    python tests/planted/run.py --axis tensor sequence --out found.jsonl
    python tests/planted/run.py --only norm-unsynced --by pytest

Each bug is a patch of the catalogue (``communication.py``). The symbolic check looks for it in the
runs of its axis (``cases.py``); with ``--by pytest`` the tests that the patch names do. A process
is forked for each, since importing torch takes longer than a check. Results are lines of JSON in
``--out``; with ``--resume`` the bugs that are there already are left out, and ``--seconds`` is the
time after which no further one begins.

Exit status: 0 if all are caught; 1 if some survive, which are named.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from communication import CATALOGUE  # noqa: E402
from planted import Planted  # noqa: E402

CPU_SECONDS, WALL_SECONDS = 180, 1200


def copied_tree(target: Path) -> None:
    """Copy the files that git knows, and Python's caches of them, with their times."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        source, place = ROOT / name, target / name
        if source.is_file() and not source.is_symlink():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)
    for cache in (ROOT / "megatron").rglob("__pycache__"):
        shutil.copytree(cache, target / cache.relative_to(ROOT), dirs_exist_ok=True)


def preload() -> None:
    """Import what all children need of other projects."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_LOG_LEVEL": "warning", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import deepspeed  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401


def plant(tree: Path, bug: Planted) -> None:
    """Write the bug into the tree, without a cache of the right code."""
    path = tree / "megatron" / bug.file
    path.write_text(bug.applied(ROOT), encoding="utf-8")
    for cache in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cache.unlink()


def heal(tree: Path, bug: Planted) -> None:
    shutil.copy2(ROOT / "megatron" / bug.file, tree / "megatron" / bug.file)


def by_symbolic_check(tree: Path, bug: Planted) -> dict[str, Any]:
    """Look for the bug in a forked process; return what it found, and its CPU time."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        os._exit(_child(into, tree, bug.axis))
    os.close(into)
    deadline = time.monotonic() + WALL_SECONDS
    data = b""
    with os.fdopen(out, "rb") as pipe:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.alarm(WALL_SECONDS)
        data = pipe.read()
        signal.alarm(0)
    _, status, usage = os.wait4(child, 0)
    found = json.loads(data) if data else f"ended by status {status}"
    if not data and time.monotonic() > deadline:
        found = "does not end"
    return {"fault": found, "cpu": round(usage.ru_utime + usage.ru_stime, 1)}


def _child(into: int, tree: Path, axis: str) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(tree), str(tree / "tests" / "planted")]
    os.chdir(tree)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    found: str | None
    try:
        import cases

        first = next(cases.faults([axis]), None)
        found = None if first is None else f"{first[2]} [{first[0]} ranks, {first[1]}]"
    except BaseException as error:  # an import may fail too
        found = f"{type(error).__name__}: {error}"
    os.write(into, json.dumps(found).encode())
    return 0


def by_tests(tree: Path, bug: Planted) -> dict[str, Any]:
    """Run the tests that the bug names, in the copy."""
    if not bug.tests:
        return {"fault": None, "cpu": 0.0}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *bug.tests],
        cwd=tree, capture_output=True, text=True, timeout=WALL_SECONDS, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    last = run.stdout.strip().splitlines()[-1:] or [""]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"fault": last[0] if run.returncode else None, "cpu": round(cpu, 1)}


def chosen(options: argparse.Namespace) -> list[Planted]:
    bugs = [
        bug
        for bug in CATALOGUE
        if (not options.axis or bug.axis in options.axis)
        and (not options.only or bug.name in options.only)
    ]
    done = set()
    if options.resume and options.out.exists():
        done = {json.loads(line)["name"] for line in options.out.read_text().splitlines()}
    number, parts = map(int, options.part.split("/"))
    return [bug for bug in bugs[number - 1 :: parts] if bug.name not in done]


def table(results: Iterable[dict[str, Any]]) -> str:
    """Caught and planted bugs of each axis."""
    of_axis: dict[str, list[bool]] = defaultdict(list)
    for each in results:
        of_axis[each["axis"]].append(each["fault"] is not None)
    lines = ["| axis | planted | caught | |", "|---|---|---|---|"]
    for axis, caught in (*of_axis.items(), ("all", sum(of_axis.values(), []))):
        share = f"{100 * sum(caught) / max(1, len(caught)):.0f} %"
        lines.append(f"| {axis} | {len(caught)} | {sum(caught)} | {share} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", nargs="*", default=[], help="only bugs of these axes")
    parser.add_argument("--only", nargs="*", default=[], help="only bugs with these names")
    parser.add_argument("--part", default="1/1", help="part N of M of the bugs, as 2/4")
    parser.add_argument("--by", choices=("symbolic", "pytest"), default="symbolic")
    parser.add_argument("--out", type=Path, default=Path("planted.jsonl"))
    parser.add_argument("--resume", action="store_true", help="leave out what is in --out")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    began, look = time.monotonic(), by_tests if options.by == "pytest" else by_symbolic_check
    bugs = chosen(options)
    if options.by == "symbolic":
        preload()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        copied_tree(tree)
        for bug in bugs:
            if time.monotonic() - began > options.seconds:
                break
            plant(tree, bug)
            try:
                result = {"name": bug.name, "axis": bug.axis, "kind": bug.kind, **look(tree, bug)}
            finally:
                heal(tree, bug)
            with options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            verdict = "SURVIVES" if result["fault"] is None else result["fault"]
            print(f"{bug.axis:9} {bug.name:32} {result['cpu']:6.1f} s  {verdict[:160]}", flush=True)
    results = [json.loads(line) for line in options.out.read_text().splitlines()]
    print(table(results))
    left = [each["name"] for each in results if each["fault"] is None]
    print(f"survivors: {', '.join(left) or 'none'}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
