"""Samples of long tables of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """Every case as a parameter of a test; those that are not kept run with ``make proof`` only. A
    tuple has the values of several parameters."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if kept(case) else pytest.mark.proof,
        )
        for case in cases
    ]
