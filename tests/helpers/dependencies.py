"""Files of the project that a test depends on, and a hash of the code in them.

Imports are followed, those inside functions included. Tests, whose subject is often a command,
also depend on the files that their strings name. The folder of a feature counts where the tests
import it or name one of its flags; of all others a test depends on their declarations alone.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DETOXIFYING = ROOT / "examples_deepspeed/megatron/detxoify_lm"
"""A folder that ``conftest.py`` puts on the path."""

SUBJECTS = [ROOT / "megatron/features", ROOT / "megatron/apps"]
FEATURES = ROOT / "megatron/config/features.py"
FORMATS = ROOT / "megatron/formats/__init__.py"
"""The files that import the modules of features and formats by their names."""

OPTIONS = {"option", "flag"}
"""Functions whose results are the fields of flags."""

LOOKED_UP = ("tests", "benchmarks", "docs/generate")
"""Folders whose modules tests import by a bare name, since a ``conftest.py`` puts them on the
path."""

ORGANISATION = {
    TESTS / "ledger.py",
    *(TESTS / "helpers" / name for name in ("parts.py", "cost.py", "dependencies.py")),
}
"""Files that say which tests run, and not what they do."""

STEM = TESTS / "helpers" / "stem.py"
"""It names modules to import ahead of time. A test itself names those that it uses."""

_FILE = re.compile(r"[\w./-]+\.(py|sh|json|jsonl|txt|tsv|toml|yaml|md)")
_USE = re.compile(r"--([a-z][\w-]*)|\b([a-z]\w*)\s*=(?!=)|[\"']([a-z]\w*)[\"']")
"""A flag of a command, an argument or field with a value, or a name in quotes."""


def code_of(test: Path) -> str:
    """Return the hash of a test file and of what it depends on. Comments, docstrings and the form
    of the source do not change it."""
    total = hashlib.sha256()
    for path in sorted(dependencies(test)):
        total.update(f"{path.relative_to(ROOT)}\0{_digest(path)}\n".encode())
    return total.hexdigest()[:16]


@cache
def dependencies(test: Path) -> frozenset[Path]:
    """Return the files that a test file depends on, itself included."""
    above = [folder for folder in test.parents if TESTS in (folder, *folder.parents)]
    conftests = (folder / "conftest.py" for folder in above)
    seen: set[Path] = set()
    waiting = {test, *filter(Path.is_file, conftests)}
    while waiting:
        path = waiting.pop()
        seen.add(path)
        waiting |= _references(path) - seen - ORGANISATION
        if not waiting:
            words = set().union(*(_words(each) for each in seen if TESTS in each.parents))
            folders = (folder for folder, flags in _flags().items() if flags & words)
            waiting |= {file for folder in folders for file in folder.rglob("*.py")} - seen
    return frozenset(seen)


@cache
def _references(path: Path) -> frozenset[Path]:
    """Files that one file imports or names."""
    if path.suffix != ".py":
        return frozenset()
    files = set(_imported(path))
    if path == FEATURES:
        files |= {file for folder in SUBJECTS for file in folder.glob("*/feature.py")}
    if path == FORMATS or (path != STEM and ROOT / "megatron" not in path.parents):
        files |= set(_named(path))
    return frozenset(files)


def _imported(path: Path) -> Iterator[Path]:
    tree = _tree(path)
    declares = path.name == "feature.py" and path.parents[1] in SUBJECTS
    for node in tree.body if declares else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (file for name in names for file in _files_of(name, path))
        elif isinstance(node, ast.ImportFrom):
            package = path.parents[node.level - 1].relative_to(ROOT).parts if node.level else ()
            base = ".".join([*package, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            yield from (file for name in names for file in _files_of(name, path))


@cache
def _files_of(module: str, importer: Path) -> tuple[Path, ...]:
    """Files of a module and of the packages around it; none for modules of others."""
    parts = module.split(".")
    of_tests = not importer.is_relative_to(ROOT / "megatron")
    for base in (ROOT, TESTS, DETOXIFYING) if of_tests else (ROOT,):
        for length in range(len(parts), 0, -1):
            path = base.joinpath(*parts[:length])
            for file in (path / "__init__.py", path.with_suffix(".py")):
                if file.is_file():
                    around = (folder / "__init__.py" for folder in file.parents if folder != ROOT)
                    return file, *filter(Path.is_file, around)
    if not of_tests:
        return ()
    same = _by_name()[f"{parts[0]}.py"] + _by_name()[parts[0]]
    near = [file for file in same if file.parent in importer.parents]
    return tuple(near or same)


@cache
def _by_name() -> dict[str, list[Path]]:
    """Modules in the folders that tests look up, by file name, and packages by folder name."""
    names = defaultdict(list)
    for folder in LOOKED_UP:
        for file in (ROOT / folder).rglob("*.py"):
            names[file.parent.name if file.name == "__init__.py" else file.name].append(file)
    return names


def _named(path: Path) -> Iterator[Path]:
    """Files whose paths, or modules whose names, are strings of a source. If the last part of a
    name is formatted, ``f"bugs.{name}"``, all modules of that package."""
    for node in ast.walk(_tree(path)):
        first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else None
        if isinstance(first, ast.Constant):
            *package, last = str(first.value).split(".")
            folders = [base.joinpath(*package) for base in (TESTS, path.parent) if package]
            if not last and all(map(str.isidentifier, package)):
                yield from (file for folder in folders for file in sorted(folder.glob("*.py")))
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if node.value.startswith("megatron."):
            yield from _files_of(node.value.split(":")[0], path)
        if node.value.isidentifier() and (program := ROOT / f"{node.value}.py").is_file():
            yield program
        for match in _FILE.finditer(node.value):
            yield from _ending(match[0].removeprefix("./"))


@cache
def _ending(name: str) -> tuple[Path, ...]:
    """Files of the project whose path ends with a name; none where there are many."""
    same = [file for file in _project_files()[Path(name).name] if f"/{file}".endswith(f"/{name}")]
    return tuple(same) if len(same) <= 3 else ()


@cache
def _project_files() -> dict[str, list[Path]]:
    names = defaultdict(list)
    folders = ("megatron", "tools", "tests", "examples_deepspeed", "deepspeed_configs", "compat")
    for file in [*ROOT.glob("*.py"), *(f for name in folders for f in (ROOT / name).rglob("*.*"))]:
        if file.is_file() and "__pycache__" not in file.parts:
            names[file.name].append(file)
    return names


@cache
def _flags() -> dict[Path, frozenset[str]]:
    """Names of the flags that only one feature has, by its folder."""
    folders = [file.parent for file in SUBJECTS[0].glob("*/feature.py")]
    names = {folder: set(_fields(folder.rglob("*.py"))) for folder in folders}
    owners = Counter(name for each in names.values() for name in each)
    owners.update(_fields((ROOT / "megatron/config").glob("*.py")))
    return {f: frozenset(n for n in each if owners[n] == 1) for f, each in names.items()}


def _fields(paths: Iterable[Path]) -> Iterator[str]:
    for node in (node for path in paths for node in ast.walk(_tree(path))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            function, target = node.value.func, node.target
            if getattr(function, "id", "") in OPTIONS and isinstance(target, ast.Name):
                yield target.id


@cache
def _words(path: Path) -> frozenset[str]:
    uses = (name for match in _USE.findall(path.read_text("utf-8")) for name in match if name)
    return frozenset(name.replace("-", "_") for name in uses)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@cache
def _digest(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".py":
        tree = ast.parse(content)  # a copy, which loses its docstrings
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]
        content = ast.dump(tree).encode()
    return hashlib.sha256(content).hexdigest()


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
