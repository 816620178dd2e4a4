"""Placeholders for libraries while a shell completes a command line.

A program's flags are known once its modules are imported, but these import torch, which takes
seconds. Completion runs only the argument parser. Therefore, all packages outside this project and
the standard library are replaced by empty modules, whose attributes are classes for any use.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from abc import ABCMeta
from typing import Any

_IMPORTED = sys.stdlib_module_names | {"megatron", "tools", "argcomplete"}


def skip_libraries() -> None:
    """Replace all external packages that are imported after this call."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


class _Accepting(ABCMeta):
    """Metaclass of a class that every use returns again, and that converts to the number 0."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *values: Any, **named: Any) -> Any:
        return cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    def __lt__(cls, other: Any) -> bool:
        return False

    def __int__(cls) -> int:
        return 0

    __ror__ = __or__
    __gt__ = __le__ = __ge__ = __lt__
    __index__ = __float__ = __int__


class _Placeholder(metaclass=_Accepting):
    def __init_subclass__(cls, **named: Any) -> None:
        pass


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder


class _Finder:
    """Import hook that replaces every external package with an empty one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in _IMPORTED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
