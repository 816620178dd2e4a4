"""Families of models that only tests have, known to a process while it needs them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from megatron import families
from megatron.config.features import Feature, features

_FOLDERS: list[Path] = []


class AddedFamilies(Feature):
    """The families of a folder: a module with ``FAMILY`` each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.families = tuple(sorted(file.stem for file in folder.glob("*.py")))  # type: ignore[misc]

    def family(self, name: str) -> Any:
        full = f"{self._folder.name}.{name}"
        if full not in sys.modules:
            spec = importlib.util.spec_from_file_location(full, self._folder / f"{name}.py")
            assert spec is not None and spec.loader is not None
            sys.modules[full] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return sys.modules[full].FAMILY


def add(folder: Path) -> bool:
    """Make the families of a folder known; False if they are."""
    if folder in _FOLDERS:
        return False
    _FOLDERS.append(folder)
    _tell()
    return True


def remove(folder: Path) -> None:
    _FOLDERS.remove(folder)
    _tell()


def _tell() -> None:
    added = {folder.name: AddedFamilies(folder) for folder in _FOLDERS}
    families.features = lambda: {**features(), **added}  # type: ignore[attr-defined]
    families.family_names.cache_clear()
    families.family_of.cache_clear()
