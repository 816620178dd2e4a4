"""What sources import, for the tests that hold the structure."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

IMPORTERS = {"import_module", "__import__"}


def sources() -> list[Path]:
    """All of the project's own Python files, tests and benchmarks aside."""
    files = [*ROOT.glob("*.py"), *(ROOT / "tools").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    return sorted([*files, *(ROOT / "megatron").rglob("*.py")])


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """A source's module, statements, calls and constants; names and contexts, which are most of
    its nodes, are left out."""
    few = ast.mod | ast.stmt | ast.Call | ast.Constant
    gc.disable()  # it would look through all trees again and again, three quarters of the time
    try:
        return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, few))
    finally:
        gc.enable()


@cache
def imports(source: str) -> tuple[str, ...]:
    """Modules that a source imports, those inside functions included."""
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


@cache
def file_of(module: str) -> Path | None:
    """The file of a module of the project; None for others, and for names inside a module."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


@cache
def imported_files(file: Path) -> frozenset[Path]:
    """Files of the project that a file's statements import, those of packages on the way
    included."""
    words = [module.split(".") for module in imports(file.read_text())]
    modules = {".".join(w[:length]) for w in words for length in range(1, len(w) + 1)}
    return frozenset(found for module in modules if (found := file_of(module)))


def closure(*start: Path) -> set[Path]:
    """Files, and all that they import, directly or not."""
    seen, waiting = set(start), list(start)
    while waiting:
        new = set(imported_files(waiting.pop())) - seen
        seen |= new
        waiting += new
    return seen
