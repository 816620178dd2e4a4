"""Every command of the documentation runs, and prints what the page says.

    MEGATRON_REWRITE_DOCS=1 pytest tests/docs/test_commands.py

writes what was printed into the output blocks that do not match.
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from doc_commands import commands, execute, free_port, fresh_folder, matches
from doc_pages import COMMANDS, NEEDS, ROOT, Block, pages, paths, read
from samples import sampled

REWRITE = bool(os.environ.get("MEGATRON_REWRITE_DOCS"))

RUN_ELSEWHERE = {"tools/README.md": "tests/apps/tools/collection/test_readme.py"}
"""Pages whose commands another test runs."""

_SERVE = ("serve", ("fastapi", "llguidance", "prometheus_client", "uvicorn"))
EXTRAS = {
    "docs/guides/generation.md": _SERVE,
    "docs/guides/lora.md": _SERVE,
    "docs/guides/retro.md": ("retro", ("h5py",)),
    "examples_deepspeed/megatron/detxoify_lm/README.md": ("detoxify", ("profanity_check",)),
}
"""Pages whose commands need an extra, and its packages; the page installs it."""

SERVER_PORT = "SERVER_PORT"
"""Of the environment of a page, once one of its commands serves."""


def runs(block: Block) -> bool:
    """Whether a test runs the commands of a block."""
    return block.language in COMMANDS and not {"needs", "form"} & set(block.markers)


WITH_COMMANDS = [
    page.path
    for page in pages()
    if page.path not in RUN_ELSEWHERE and any(runs(block) for block in page.blocks)
]


LONG = (
    "docs/how-to/which-layout.md",
    "docs/guides/parity.md",
    "docs/guides/profiling.md",
    "docs/guides/tokenizers.md",
)
"""Pages whose tools take minutes and nothing else."""


def is_long(block: Block) -> bool:
    """Whether the commands of a block are tools that take minutes."""
    tools = [str(command.program).startswith("tools/") for command in commands(block)]
    return block.markers.get("needs") == "minutes" and all(tools)


LONGEST = {
    "docs/guides/evaluation.md",
    "docs/guides/generation.md",
    "docs/guides/lora.md",
    "docs/reference/megatron-deepspeed.md",
    "docs/guides/distillation.md",
    "docs/guides/experts.md",
    "docs/how-to/when-something-goes-wrong.md",
    "docs/how-to/several-gpus.md",
    "docs/guides/finetune.md",
    "examples_deepspeed/megatron/detxoify_lm/README.md",
    "docs/guides/planning.md",
    "docs/guides/preferences.md",
    "docs/guides/retro.md",
    "docs/guides/bert-and-t5.md",
    "docs/guides/glue-race-squad.md",
    "docs/guides/llama.md",
    "docs/how-to/which-layout.md",
    "docs/how-to/first-run.md",
    "docs/how-to/resume.md",
    "docs/guides/instruction-data.md",
    "docs/guides/long-context.md",
}
"""Pages whose commands take the longest; `make proof` runs them."""


@pytest.mark.parametrize("path", sampled(WITH_COMMANDS, lambda path: path not in LONGEST))
def test_commands(path, programs, prepared, tmp_path):
    """The blocks of a page, one after the other in one folder."""
    check(path, runs, programs, prepared, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("path", LONG)
def test_long_commands(path, programs, prepared, tmp_path):
    """Those, too, that take minutes."""
    check(path, lambda block: runs(block) or is_long(block), programs, prepared, tmp_path)


def check(path, chosen, programs, prepared, tmp_path):
    """Runs the chosen blocks of a page, and compares what it shows of their output."""
    extra, packages = EXTRAS.get(path, ("", ()))
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (the extra {extra})")
    page, printed, environment = read(path), None, {}
    folder = fresh_folder(tmp_path / "page", prepared, page.markers.get("prepare", ""))
    wrong: list[tuple[Block, str]] = []
    with contextlib.ExitStack() as servers:
        for block in page.blocks:
            if "file" in block.markers:
                target = folder / block.markers["file"]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text + "\n")
            elif block.language in COMMANDS:
                printed = None
                if chosen(block):
                    printed = run_block(block, folder, programs, environment, servers)
            elif "output" in block.markers and printed is not None:
                numbers_vary = "vary" in block.markers["output"]
                wrong += [] if matches(block.lines, printed, numbers_vary) else [(block, printed)]
    if REWRITE:
        for block, text in reversed(wrong):
            rewrite(block, text)
        return
    shown = "\n".join(f"{b.where}: the command prints\n{text}" for b, text in wrong)
    assert not wrong, f"{shown}\n(MEGATRON_REWRITE_DOCS=1 writes it there)"


def run_block(
    block: Block,
    folder: Path,
    programs,
    environment: dict[str, str],
    servers: contextlib.ExitStack | None = None,
) -> str:
    """Runs the commands of a block; returns all that they printed. A server runs on among the
    ``servers``, and the commands that follow ask it at its port."""
    printed = []
    if SERVER_PORT in environment:
        block = replace(block, lines=[asked_at(environment, line) for line in block.lines])
    found = commands(block)
    for number, command in enumerate(found):
        if "serves" in block.markers and number == len(found) - 1:
            assert servers is not None and command.program is not None
            environment[SERVER_PORT] = free_port()
            words = [*command.words, "--port", environment[SERVER_PORT]]
            servers.enter_context(programs.serving(command.program, words, folder))
            continue
        extra = block.markers.get("smaller", "")
        status, text = execute(command, folder, programs, environment, extra)
        printed.append(text)
        fails = "fails" in block.markers and number == len(found) - 1
        ended = bool(status) == fails or command.may_fail
        assert ended, f"{block.where}: {command.text}\nstatus {status}\n{text}"
    return "".join(printed)


def asked_at(environment: dict[str, str], line: str) -> str:
    """A line with the port of the server that runs."""
    return re.sub(r"\b(localhost|127\.0\.0\.1):5000\b", rf"\1:{environment[SERVER_PORT]}", line)


def rewrite(block: Block, printed: str) -> None:
    """Puts what was printed into an output block."""
    path = ROOT / block.page
    lines = path.read_text().splitlines()
    shown = printed.strip("\n").splitlines()
    new = [f"{block.indent}{line}".rstrip() for line in shown]
    lines[block.line - 1 : block.line - 1 + len(block.lines)] = new
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("path", paths())
def test_every_block_says_what_it_is(path):
    """Commands and their output are marked, so that none is left out by mistake."""
    for block in read(path).blocks:
        where, markers = block.where, set(block.markers)
        if "needs" in markers:
            assert set(block.markers["needs"].split()) <= NEEDS, where
            continue
        if path in RUN_ELSEWHERE or block.language in COMMANDS:
            continue
        assert markers & {"file", "output", "listing", "form"}, f"{where}: a block without marker"


@pytest.mark.parametrize("path", [p.path for p in pages()])
def test_json_and_python_blocks(path):
    """JSON can be parsed (a section of a file as the inside of an object), and so can Python;
    what it imports of this project exists."""
    for block in read(path).blocks:
        if block.language == "json":
            text = block.text.strip()
            json.loads(text if text.startswith(("{", "[")) else f"{{{text}}}")
        elif block.language == "python":
            for node in ast.walk(ast.parse(textwrap.dedent(block.text))):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron"):
                    module = importlib.import_module(str(node.module))
                    assert all(hasattr(module, name.name) for name in node.names), block.where


def test_a_command_that_fails_or_prints_something_else_is_noticed(programs, prepared, tmp_path):
    folder = fresh_folder(tmp_path / "page", prepared, "")
    block = Block("page.md", 1, "sh", ["python tools/layouts.py --nothing"], {})
    with pytest.raises(AssertionError, match="unknown flag --nothing"):
        run_block(block, folder, programs, {})
    block.markers["fails"] = ""
    assert "unknown flag" in run_block(block, folder, programs, {})
    assert matches(["a 1.5 b", "...", "d ..."], "a 1.5 b\nc\nd e f\n", numbers_vary=False)
    assert not matches(["a 1.5 b"], "a 1.6 b\n", numbers_vary=False)
    assert matches(["a 1.5  b"], "a 12,600 b\n", numbers_vary=True)
    assert not matches(["a 1.5 b"], "a 1.5 c\n", numbers_vary=True)
