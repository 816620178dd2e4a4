"""Placeholders for libraries while a shell completes a command line.

A program's flags are known when its modules are imported, and these import torch, which takes
seconds. Completion runs nothing but the argument parser, so every package that is neither ours nor
Python's is replaced by an empty module, any attribute of which is a class that accepts everything.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from abc import ABCMeta
from typing import Any

_IMPORTED = sys.stdlib_module_names | {"megatron", "tools", "argcomplete"}


def skip_libraries() -> None:
    """Replaces all packages that are imported later."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


class _Accepting(ABCMeta):
    """A class of which every use returns the class itself; converted to a number it is 0."""

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
    """Finds every package that is not to be imported, and loads an empty one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in _IMPORTED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
