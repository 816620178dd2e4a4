"""All planted bugs: the lists ``BUGS`` of the files in ``bugs/``."""

import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from planted import Planted  # noqa: E402

CATALOGUE: list[Planted] = [
    bug
    for file in sorted((HERE / "bugs").glob("*.py"))
    for bug in import_module(f"bugs.{file.stem}").BUGS
]
