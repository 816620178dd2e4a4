"""Python expressions in rule tables, whose names are the keys of a configuration file and a few
functions. Tables are part of this package. A user's values are never evaluated as code.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

from megatron.apps.migration.translation import Translation, is_off, number
from megatron.config import ConfigError
from megatron.util.json_text import parse_json


def words_of(value: Any) -> set[str]:
    """Return the set of words (letters and underscores) in a value."""
    return set(re.findall(r"[A-Za-z_]+", str(value or "")))


def names_of(value: Any) -> list[str]:
    """Return the names in a list or in comma-separated text."""
    if value is None:
        return []
    return [str(v).strip() for v in (value if isinstance(value, list) else str(value).split(","))]


def blend(paths: list[Any], weights: list[Any]) -> list[Any]:
    """Return the arguments of a Megatron blend: each weight (1 by default) followed by its path. A
    single path has no weight."""
    weights = weights or [1] * len(paths)
    return (
        paths
        if len(paths) == 1
        else [w for pair in zip(weights, paths, strict=False) for w in pair]
    )


def pairs(text: Any) -> dict[str, str]:
    """Parse ``a=b c=d``, separated by spaces or commas, into a dictionary."""
    words = re.split(r"[ ,]+", text or "")
    return dict(word.split("=", 1) for word in words if "=" in word)


def integers(value: Any) -> list[int]:
    """Return the integers in a value such as ``(128, 0)``."""
    return [int(digits) for digits in re.findall(r"-?\d+", str(value))]


def section(t: Translation, name: str) -> dict[str, Any]:
    """Return the values in a section of the file. It may also be JSON text on a command line."""
    text = t.get(name)
    if isinstance(text, str) and text.startswith("{"):
        return dict(parse_json(text.encode(), name))
    return {key[len(name) + 1 :]: t.source[key] for key in t.given(f"{name}.*")}


def rounded(value: float) -> float:
    """Round a number to ten significant digits, so that 0.1 times 3e-4 gives 3e-5."""
    return float(f"{value:.10g}")


def download(name: Any, kind: str = "") -> str:
    """Return a note on how to download from the Hugging Face Hub, or "" for a local path."""
    text = str(name)
    if text.count("/") != 1 or text.startswith((".", "/")) or Path(text).exists():
        return ""
    return f"a folder: hf download {kind}{text} --local-dir {text}"


_FUNCTIONS: dict[str, Any] = {
    **{
        f.__name__: f
        for f in (int, float, str, min, max, round, len, set, sorted, list, isinstance)
    },
    **{f.__name__: f for f in (number, is_off, rounded, download, blend, pairs, integers)},
    **{"words": words_of, "names": names_of, "json": json.dumps},
}


class _Dotted(ast.NodeTransformer):
    """Transformer that turns attribute access ``a.b`` into a single name, except in calls."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
            node.args = [self.visit(each) for each in node.args]
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.copy_location(ast.Name(ast.unparse(node), ast.Load()), node)


@cache
def compiled(text: str) -> CodeType:
    """Compile an expression in which dotted keys are names."""
    tree = _Dotted().visit(ast.parse(text.strip(), mode="eval"))
    return compile(ast.fix_missing_locations(tree), text, "eval")


class Values(dict[str, Any]):
    """Namespace of an expression: variables set by ``let``, then the keys of the file."""

    def __init__(self, t: Translation, defaults: Mapping[str, Any], prefix: str) -> None:
        super().__init__(has=t.has, flag=t.value_of, given=t.given, trainer=t.trainer)
        self["section"] = partial(section, t)
        self.t, self.defaults, self.prefix = t, defaults, prefix

    def __missing__(self, name: str) -> Any:
        if name in _FUNCTIONS:
            raise KeyError(name)
        if name in ("tuning", "program"):
            return self.t.program == "finetune.py" if name == "tuning" else self.t.program
        value = self.t.source.get(self.prefix + name)
        return self.defaults.get(name) if value is None else value

    def of(self, text: str) -> Any:
        """Evaluate an expression from a table. A user's file only provides the values of names.
        Raises ConfigError, with the keys involved, if a value has an unexpected type."""
        try:
            return eval(compiled(text), {"__builtins__": {}, **_FUNCTIONS}, self)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            names = compiled(text).co_names
            keys = [
                f"{key} {self[key]!r:.60}" for key in names if self.prefix + key in self.t.source
            ]
            raise ConfigError(
                f"{', '.join(keys) or text}: the value is not of the kind expected: {error}"
            ) from None
