"""Figures of the design, drawn from the code as inline SVG.

Colours are those of the page (``currentColor`` and the theme's variables), so that a figure follows
its light and dark scheme.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron"

BATCH: tuple[tuple[str, str], ...] = (
    ("Indexed files, raw text or examples", "Documents"),
    ("Sample i: seq-length + 1 token ids", "GPTDataset"),
    ("Blend: which file gives sample i", "BlendedDataset"),
    ("Which samples this rank reads", "MicroBatchSampler"),
    ("Micro batches, loaded ahead", "Prefetcher"),
    ("One optimizer step", "Trainer"),
    ("Forward, backward, update", "TrainEngine"),
    ("What travels between layers", "LayerState"),
    ("Layer after layer", "LayerSequence"),
    ("Loss, norm, what was skipped", "StepResult"),
)
"""The stations of a batch: what happens, and the class or function that does it."""

CHECKPOINT: tuple[tuple[str, str], ...] = (
    ("The engine's state, at any ZeRO stage", "owned_slices"),
    ("Part of a parameter, by canonical name", "Slice"),
    ("safetensors per rank, index, manifest", "SliceWriter"),
    ("A folder that appears by a rename", "checkpoint.publish"),
    ("Which format a folder has", "locate_checkpoint"),
    ("Reading, the same for every format", "checkpoint.Source"),
    ("Only what each process keeps", "engine.load_checkpoint"),
)
"""The stations of a checkpoint."""


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and a smaller line below it."""

    x: float
    y: float
    width: float
    title: str
    note: str = ""
    height: float = 46

    def svg(self) -> str:
        middle = self.x + self.width / 2
        lines = [
            f'<rect x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}" '
            'rx="6"/>',
            f'<text x="{middle:g}" y="{self.y + (20 if self.note else 28):g}">'
            f"{escape(self.title)}</text>",
        ]
        if self.note:
            lines.append(
                f'<text class="note" x="{middle:g}" y="{self.y + 37:g}">{escape(self.note)}</text>'
            )
        return "".join(lines)


def figure(name: str) -> str:
    """The figure of a name as HTML."""
    return {"imports": imports, "step": step, "batch": batch, "checkpoint": checkpoint}[name]()


def _svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    head = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker>'
    )
    return (
        f'<div class="figure"><svg viewBox="0 0 {width:g} {height:g}" '
        f'style="width:{width:g}px" role="img" aria-label="{escape(title)}">'
        f"<defs>{head}</defs>{''.join(parts)}</svg></div>"
    )


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="arrow" d="M{x1:g} {y1:g} L{x2:g} {y2:g}" marker-end="url(#tip)"/>'


def _column(stations: Sequence[tuple[str, str]], title: str) -> str:
    """Boxes below each other, joined by arrows."""
    width, step, parts = 350, 66, []
    for number, (text, note) in enumerate(stations):
        y = 2 + number * step
        parts.append(Box(2, y, width - 4, text, note).svg())
        if number:
            parts.append(_arrow(width / 2, y - 20, width / 2, y - 2))
    return _svg(width, step * len(stations) - 16, parts, title)


@cache
def places() -> dict[str, list[Path]]:
    """Files of megatron/ that define a class or a function at their top, by its name."""
    found: dict[str, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.setdefault(node.name, []).append(file)
    return found


def file_of(name: str) -> Path:
    """The file that defines a class or function.

    Args:
        name: its name; a package in front of it, as in ``checkpoint.Source``, says where to look.

    Raises:
        ValueError: no file does, or several do.
    """
    package, _, short = name.rpartition(".")
    folder = PACKAGE.joinpath(*filter(None, package.split(".")))
    files = [f for f in places().get(short, []) if f.is_relative_to(folder)]
    if len(files) != 1:
        raise ValueError(f"docs: {name} is defined in {len(files)} files of megatron/")
    return files[0]


def _flow(stations: Sequence[tuple[str, str]], title: str) -> str:
    """A column of stations, each of which must be in the code."""
    return _column(
        [
            (text, f"{name.rpartition('.')[2]}, {file_of(name).relative_to(PACKAGE)}")
            for text, name in stations
        ],
        title,
    )


def batch() -> str:
    """The path of a batch."""
    return _flow(BATCH, "The path of a batch, from files to the result of a step")


def checkpoint() -> str:
    """The path of a checkpoint."""
    return _flow(CHECKPOINT, "The path of a checkpoint, from the engine to another layout")


def package_imports() -> dict[str, set[str]]:
    """The packages of megatron/, each with those that its files import."""
    packages = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    found: dict[str, set[str]] = {name: set() for name in packages}
    for name in packages:
        for file in (PACKAGE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                modules: list[str] = []
                if isinstance(node, ast.ImportFrom) and node.module:
                    modules = [node.module]
                elif isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                for module in modules:
                    words = module.split(".")
                    if words[0] == "megatron" and len(words) > 1 and words[1] in found:
                        found[name].add(words[1])
        found[name].discard(name)
    found["run"].discard("training")  # they are one level, drawn with the arrow from the second
    return found


def _levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """The row of each package, counted from below: right below the packages that import it."""
    importers = {name: [other for other in graph if name in graph[other]] for name in graph}

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(other) for other in importers[name]), default=-1)

    deepest = max(map(depth, graph))
    return {name: deepest - depth(name) for name in graph}


def _needed(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The edges that do not follow from others."""

    def reach(name: str) -> set[str]:
        return graph[name].union(*(reach(other) for other in graph[name]))

    return {
        name: {other for other in found if not any(other in reach(o) for o in found - {other})}
        for name, found in graph.items()
    }


def imports() -> str:
    """Draw which package imports which; edges that follow from others are left out."""
    graph = package_imports()
    levels, edges = _levels(graph), _needed(graph)
    rows = [[n for n in graph if levels[n] == row] for row in range(max(levels.values()) + 1)]
    box, gap, step = 118, 12, 92
    width = max(len(row) for row in rows) * (box + gap) + gap
    places, parts = {}, []
    for number, row in enumerate(reversed(rows)):
        left = (width - len(row) * (box + gap) + gap) / 2
        for place, name in enumerate(row):
            files = len(list((PACKAGE / name).rglob("*.py")))
            note = f"{files} files"
            places[name] = Box(left + place * (box + gap), 2 + number * step, box, name, note)
    for name, found in edges.items():
        for other in sorted(found):
            a, b = places[name], places[other]
            parts.append(_arrow(a.x + box / 2, a.y + a.height, b.x + box / 2, b.y - 2))
    parts += [place.svg() for place in places.values()]
    title = "Packages of megatron/ and what they import: arrows lead to the imported package"
    return _svg(width, step * len(rows) - step + 50, parts, title)


FIRST_PRODUCT = """
import os, sys
from torch.utils._python_dispatch import TorchDispatchMode
import pretrain_gpt

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}

class UntilTheFirstProduct(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.name().removeprefix("aten::").partition(".")[0] in PRODUCTS:
            frames, frame = [], sys._getframe(1)
            while frame is not None:
                frames.append(frame.f_code)
                frame = frame.f_back
            if any(code.co_name == "train_step" for code in frames):
                for code in reversed(frames):
                    print(f"frame {code.co_filename}:{code.co_firstlineno}")
                sys.stdout.flush()
                os._exit(0)
        return operator(*args, **(kwargs or {}))

with UntilTheFirstProduct():
    pretrain_gpt.main()
"""

SMALL_RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 9 "
    "--num-workers 0 --eval-iters 0 --peak-tflops 1 --train-iters 1"
).split()


def calls_of_a_step() -> list[tuple[str, str]]:
    """Function and file of each of our frames from ``main`` to the first matrix product."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PRODUCT, *SMALL_RUN, "--mock-data"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"docs/generate/figures.py: the run failed:\n{done.stderr}")
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("frame ")]
    places = [line.rpartition(":") for line in lines if line.startswith(f"{ROOT}/")]
    found = [(Path(file), int(line)) for file, _, line in places]
    return [
        (_function_at(file, line), str(file.relative_to(ROOT)).removeprefix("megatron/"))
        for file, line in found
        if ".venv" not in file.parts
    ]


@cache
def _function_at(file: Path, line: int) -> str:
    """The function that begins at a line, with its class."""

    def search(node: ast.AST, prefix: str) -> str | None:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                if first == line:
                    return name
                if first <= line <= (child.end_lineno or 0):
                    return search(child, f"{name}.")
            elif found := search(child, prefix):
                return found
        return None

    return search(ast.parse(file.read_text()), "") or "?"


def step() -> str:
    """The calls from ``main`` to the first matrix product, as a run made them."""
    return _column(calls_of_a_step(), "Calls from main to the first matrix product of a step")
