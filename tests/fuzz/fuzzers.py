"""All fuzzers, collected from the files of ``readers``."""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from pathlib import Path

from fuzz.fuzzer import Fuzzer

KINDS = tuple(sorted(path.stem for path in (Path(__file__).parent / "readers").glob("*.py")))
FUZZERS: dict[str, Fuzzer] = {
    fuzzer.name: fuzzer
    for fuzzer in chain.from_iterable(
        import_module(f"fuzz.readers.{kind}").FUZZERS for kind in KINDS
    )
}
"""By name."""
