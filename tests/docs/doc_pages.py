"""The documentation as blocks, links and words.

Every fenced block is run or compared by a test, or says by a comment above it why not:

    <!-- needs: gpu -->        or cluster, minutes, network, files (of the reader's own)
    <!-- form -->              a command with ... for what the reader fills in; its flags exist
    <!-- listing -->           a drawing, a folder, a quotation: neither command nor output
    <!-- file: NAME -->        the block is this file for the commands that follow
    <!-- output -->            what the commands before it print; ... stands for anything
    <!-- output: numbers vary -->    the same, and any number stands for any other
    <!-- serves -->            the last of these commands is a server, which runs until the page
                               ends; the test gives it a free port instead of 5000
    <!-- fails -->             the last of these commands ends with an error
    <!-- smaller: FLAGS -->    what the test appends, too, to the commands that train; "nothing":
                               they are run as they are
    <!-- figure: NAME -->, <!-- api: NAME -->    drawn, or read from docstrings, by the site
    <!-- prepare: WORDS -->    at the top of a page: what its commands find (doc_commands.py)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

NEEDS = {"gpu", "cluster", "minutes", "network", "files"}
MARKERS = set(
    "needs form listing file output fails serves smaller prepare figure api ledger planted".split()
)
COMMANDS = {"sh", "bash"}
"""Languages of blocks that are typed into a shell."""

_COMMENT = re.compile(r"^ *<!-- *([a-z]+)(?:: *(.*?))? *-->$")
_FENCE = re.compile(r"^( *)```(\w*)$")


@dataclass
class Block:
    """A fenced block.

    Attributes:
        page: path of the page in the repository.
        line: number of its first line inside the fence, from 1.
        language: what stands behind the opening fence.
        lines: its text without the fence's indent.
        markers: the comments above it.
        indent: of the fence.
    """

    page: str
    line: int
    language: str
    lines: list[str]
    markers: dict[str, str]
    indent: str = ""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    """A page of the documentation.

    Attributes:
        path: its path in the repository.
        blocks: fenced blocks, in order.
        prose: line numbers and lines outside of them.
        markers: comments that belong to the whole page.
    """

    path: str
    blocks: list[Block] = field(default_factory=list)
    prose: list[tuple[int, str]] = field(default_factory=list)
    markers: dict[str, str] = field(default_factory=dict)


def paths() -> list[str]:
    """All pages: README and docs, the folders' own pages, and how to contribute."""
    found = ["README.md", "CONTRIBUTING.md", "RELEASING.md", "tools/README.md"]
    found += ["examples_deepspeed/README.md", "examples_deepspeed/megatron/detxoify_lm/README.md"]
    found += ["deepspeed_configs/README.md", "compat/README.md"]
    return found + sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))


@cache
def read(path: str) -> Page:
    """Parses a page."""
    page, markers = Page(path), {}
    lines = iter(enumerate((ROOT / path).read_text().splitlines(), 1))
    for number, line in lines:
        if opening := _FENCE.match(line):
            block = Block(path, number + 1, opening[2], [], markers, opening[1])
            for _, inner in lines:
                if inner == f"{opening[1]}```":
                    break
                block.lines.append(inner.removeprefix(opening[1]))
            page.blocks.append(block)
            markers = {}
        elif comment := _COMMENT.match(line):
            assert comment[1] in MARKERS, f"{path}:{number}: unknown marker {comment[1]}"
            if comment[1] == "prepare":
                page.markers[comment[1]] = comment[2] or ""
            else:
                markers[comment[1]] = comment[2] or ""
        else:
            page.prose.append((number, line))
            if line.strip():
                markers = {}
    return page


def pages() -> Iterator[Page]:
    """All pages, parsed."""
    yield from map(read, paths())


def table_rows(text: str, width: int) -> list[list[str]]:
    """The cells of the rows of all tables of this width, without those of their heads."""
    lines, found = text.splitlines(), []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("| ") and len(cells) == width and not after.startswith("|---"):
            found.append(cells)
    return found
