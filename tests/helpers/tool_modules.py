"""The repository's command lines as modules, so that a test can call them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_program(path: str) -> ModuleType:
    """The module of a file, by its path from the repository's root (``tools/plan.py``)."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the flags read the help texts from a class's module
    spec.loader.exec_module(module)
    return module
