"""Texts of the Retro benchmark: documentation and source of Python's standard library, which say
the same in other places, and pages of the web, of which neither says anything."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the root of this checkout

from megatron.apps.quickstart.corpus import read_source, source_files, standard_library  # noqa: E402
from megatron.util.files import write_whole  # noqa: E402

SHORTEST, SHARE = 1500, 0.3
"""Characters of a page of documentation at least, and its share of the source's; modules with less
are left out."""
WEB = 1_200_000
"""Characters of the web at most."""
NAMES = ("pages", "sources", "web")
"""The three texts: NAME.jsonl."""


def write_texts(folder: Path, web: Path) -> None:
    """Writes pages.jsonl, sources.jsonl and web.jsonl, with a document a line.

    Every module has a page and a source. They are in opposite orders, so that where a split holds
    out the last fifth of the pages, the sources of these modules are in the training part, and the
    other way round.

    Args:
        folder: where they are written.
        web: JSON lines with the key ``text``.
    """
    modules = list(documented_modules(standard_library()))
    texts = list(_beginning(web, WEB))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "pages.jsonl", (page for page, _ in modules))
    _write(folder / "sources.jsonl", (source for _, source in reversed(modules)))
    _write(folder / "web.jsonl", texts)


def _beginning(web: Path, characters: int) -> Iterator[str]:
    """The first texts of a file, of so many characters together at most."""
    with web.open(encoding="utf-8") as lines:
        for line in lines:
            text = str(json.loads(line)["text"])
            characters -= len(text)
            if characters < 0:
                return
            yield text


def documented_modules(root: Path) -> Iterator[tuple[str, str]]:
    """Page and source of every module below a folder with a page that is long enough, ordered by
    hashed names."""
    for path in source_files(root):
        source = read_source(path)
        if source is None:
            continue
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        page = "\n\n".join(_entries(name, tree))
        if len(page) >= max(SHORTEST, SHARE * len(source)):
            yield page, source


def _entries(name: str, module: ast.Module) -> Iterator[str]:
    """The documentation of a module: its text, and that of its classes and functions, each below
    its signature."""
    yield f"{name}\n{ast.get_docstring(module) or ''}".rstrip()
    yield from _definitions(module.body, "")


def _definitions(body: Sequence[ast.stmt], path: str) -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        text, name = ast.get_docstring(node), path + node.name
        if isinstance(node, ast.ClassDef):
            if text:
                yield f"class {name}\n{text}"
            yield from _definitions(node.body, f"{name}.")
        elif text:
            yield f"{name}({ast.unparse(node.args)})\n{text}"


def _write(path: Path, texts: Iterable[str]) -> None:
    write_whole(path, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
