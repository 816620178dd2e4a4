"""The fuzzers: a file for the readers of a kind."""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from pathlib import Path

from fuzz.fuzzer import Fuzzer

KINDS = tuple(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem != "__init__"))
FUZZERS: dict[str, Fuzzer] = {
    fuzzer.name: fuzzer
    for fuzzer in chain.from_iterable(
        import_module(f"fuzz.readers.{kind}").FUZZERS for kind in KINDS
    )
}
"""By name."""
