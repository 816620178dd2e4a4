"""The public Python API as text: names, signatures and fields of what docs/reference/api.md lists.

It is read from the source, so that it is the same on every version of Python.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "api.md"
RECORD = ROOT / "tests" / "golden" / "public_api.txt"

API = dict[str, list[str]]
"""Lines of each public object, by its dotted name: of a class its fields and methods."""


def public_names() -> list[str]:
    """Return the names by which programs import the classes and functions of the page."""
    names = re.findall(r"^<!-- api: ([\w.]+) -->$", PAGE.read_text(), re.MULTILINE)
    return [_imported_as(*name.rpartition(".")[::2]) for name in names]


def _imported_as(package: str, name: str) -> str:
    """The dotted name of what one file of a package defines."""
    folder = ROOT / "megatron" / package.replace(".", "/")
    definition = re.compile(rf"^(?:class|def) {name}\b", re.MULTILINE)
    places = [path for path in folder.rglob("*.py") if definition.search(path.read_text())]
    assert len(places) == 1, f"{package}.{name} is defined in {len(places)} files"
    parts = places[0].relative_to(ROOT).with_suffix("").parts
    return ".".join([*(part for part in parts if part != "__init__"), name])


def described(names: Iterable[str], root: Path = ROOT) -> API:
    """Return the lines of each class and function; ``root`` is the folder of its package."""
    return {name: list(_lines(name, root)) for name in names}


def as_text(api: API) -> str:
    return "".join(
        f"{name}\n" + "".join(f"    {line}\n" for line in lines) for name, lines in api.items()
    )


def parsed(text: str) -> API:
    """Return the lines of a text of :func:`as_text`."""
    api: API = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            lines = api[line] = []
        else:
            lines.append(line.strip())
    return api


def differences(old: API, new: API) -> tuple[list[str], list[str]]:
    """Return what breaks programs that use the old API, and what is only new."""
    breaks, additions = [], []
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            breaks.append(f"{name} is gone")
            continue
        if name not in old:
            additions.append(f"{name} is new")
            continue
        before = {_subject(line): line for line in old[name]}
        after = {_subject(line): line for line in new[name]}
        for subject, line in before.items():
            now = after.get(subject)
            if now is None:
                breaks.append(f"{name}: {line} is gone")
            elif now != line:
                kind = additions if accepts_all_of(now, line) else breaks
                kind.append(f"{name}: {line} is now {now}")
        additions += [f"{name}: {line} is new" for s, line in after.items() if s not in before]
    return breaks, additions


def accepts_all_of(new: str, old: str) -> bool:
    """True if every call of the old signature is one of the new: parameters were added behind the
    others or by keyword only, with defaults."""
    functions = [_function(line) for line in (old, new)]
    if None in functions:
        return False
    (before, after) = functions
    assert before is not None and after is not None
    if before[0] != after[0] or before[2] != after[2]:
        return False
    position = [p for p in before[1] if not p[2]], [p for p in after[1] if not p[2]]
    if position[1][: len(position[0])] != position[0]:
        return False
    added = [p for p in after[1] if p not in before[1]]
    return all(p in after[1] for p in before[1]) and all(p[1] for p in added)


_Parameter = tuple[str, bool, bool]
"""A parameter with its type and default, whether it has one, and whether it is a keyword only."""


def _function(line: str) -> tuple[str, list[_Parameter], str] | None:
    words = re.fullmatch(r"((?:@\w+ )*)(\w+\(.*)", line)
    if not words:
        return None
    (node,) = ast.parse(f"def {words[2]}: ...").body
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    parameters: list[_Parameter] = []
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: Sequence[ast.expr | None] = [
        *[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults,
    ]  # fmt: skip
    pairs = [(arg, default, False) for arg, default in zip(plain, defaults, strict=True)]
    pairs += [
        (arg, default, True)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    for arg, default, keyword in pairs:
        text = ast.unparse(arg) + (f" = {ast.unparse(default)}" if default else "")
        parameters.append((text, default is not None, keyword))
    for star, more in (("*", arguments.vararg), ("**", arguments.kwarg)):
        parameters += [(star + ast.unparse(more), True, True)] if more else []
    returns = ast.unparse(node.returns) if node.returns else ""
    return words[1] + node.name, parameters, returns


def _subject(line: str) -> str:
    """The name of a field or method that a line describes."""
    match = re.match(r"(?:@\w+ )*(?:\w+ )?(\w+)", line)
    assert match, line
    return match[1]


def _lines(name: str, root: Path) -> Iterator[str]:
    node = _definition(name, root)
    if not isinstance(node, ast.ClassDef):
        yield _signature(node)
        return
    classes, others = _bases(name, root)
    yield f"class {node.name}({', '.join(others)})"
    seen: set[str] = set()
    for cls in classes:
        for member in cls.body:
            line = _member(member)
            if line and _subject(line) not in seen:
                seen.add(_subject(line))
                yield line


def _definition(name: str, root: Path) -> ast.stmt:
    module, _, short = name.rpartition(".")
    return _statements(module, root)[0][short]


def _bases(name: str, root: Path) -> tuple[list[ast.ClassDef], list[str]]:
    """A class with the classes of this project that it extends, and the names of others."""
    module, _, short = name.rpartition(".")
    own, imported = _statements(module, root)
    node = own[short]
    assert isinstance(node, ast.ClassDef)
    classes, others = [node], []
    for base in (one for one in node.bases if not isinstance(one, ast.Starred)):
        text = ast.unparse(base).partition("[")[0]
        place = f"{module}.{text}" if text in own else imported.get(text, "")
        if place.startswith("megatron."):
            more, names = _bases(place, root)
            classes += more
            others += names
        else:
            others.append(text)
    return classes, others


@cache
def _statements(module: str, root: Path) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """The classes and functions of a module, and dotted names of what it imports, by name."""
    path = root / f"{module.replace('.', '/')}.py"
    path = path if path.is_file() else path.with_suffix("") / "__init__.py"
    tree = ast.parse(path.read_text())
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    own = {node.name: node for node in tree.body if isinstance(node, kinds)}
    return dict(own), {name: _defined(at, root) for name, at in imported.items()}


def _defined(name: str, root: Path) -> str:
    """Where a name is defined that a package imports for its users, as megatron.config does."""
    module, _, short = name.rpartition(".")
    package = root / module.replace(".", "/") / "__init__.py"
    if not module.startswith("megatron") or not package.is_file():
        return name
    match = re.search(
        rf"^from ([\w.]+) import (?:[^()\n]*|\([^)]*)\b{short}\b", package.read_text(), re.MULTILINE
    )
    return f"{match[1]}.{short}" if match else name


def _member(node: ast.stmt) -> str | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        default = node.value
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "option":
            default = default.args[0] if default.args else None
        end = f" = {ast.unparse(default)}" if default else ""
        line = f"{node.target.id}: {ast.unparse(node.annotation)}{end}"
        return None if node.target.id.startswith("_") else line
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if node.name.startswith("_") and node.name not in ("__init__", "__call__", "__iter__"):
            return None
        return _signature(node)
    return None


def _signature(node: ast.stmt) -> str:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    shown = ("property", "cached_property", "classmethod", "staticmethod", "contextmanager")
    names = [ast.unparse(one).rpartition(".")[2] for one in node.decorator_list]
    marks = "".join(f"@{name} " for name in names if name in shown)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{marks}{node.name}({ast.unparse(node.args)}){returns}"
