"""Inputs drawn by Hypothesis, for as long as wanted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from fuzz.edits import Edit
from fuzz.fuzzer import Broken
from fuzz.sandbox import Sandbox
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure

EDITS = st.lists(
    st.builds(Edit, st.integers(0, 255), st.integers(0, 2**32 - 1)), min_size=1, max_size=3
)
BATCH = 200


class Summary(NamedTuple):
    """What a campaign did: inputs that were read, inputs that were refused, and causes for which
    the rule was broken."""

    read: int
    refused: int
    findings: int


def batch(
    sandbox: Sandbox,
    seed: int,
    examples: int,
    known: frozenset[str] = frozenset(),
    stop: float = math.inf,
) -> None:
    """Some inputs, until the clock ``stop``. Raises Broken, with as few edits as possible, for the
    first finding whose rule is not known."""

    @seeded(seed)
    @settings(
        max_examples=examples, deadline=None, database=None, print_blob=False,
        report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=tuple(HealthCheck),
    )  # fmt: skip
    @given(EDITS)
    def check(edits: list[Edit]) -> None:
        if time.monotonic() > stop:
            return
        finding = sandbox.finding(edits)
        if finding is not None and finding.rule not in known:
            raise Broken(sandbox.fuzzer.name, edits, finding)

    check()


def campaign(sandbox: Sandbox, seconds: float, seed: int = 0) -> Iterator[Broken | Summary]:
    """Batches until the time is over. Yields each finding when it is made, and at last what was
    done."""
    stop, found = time.monotonic() + seconds, set[str]()
    while time.monotonic() < stop:
        try:
            batch(sandbox, seed, BATCH, frozenset(found), stop)
        except Broken as broken:
            found.add(broken.finding.rule)
            yield broken
        except FlakyFailure as flaky:  # what depends on the time, or on inputs before it
            broken = next(each for each in flaky.exceptions if isinstance(each, Broken))
            found.add(broken.finding.rule)
            yield broken
        seed += 1
    yield Summary(sandbox.read, sandbox.refused, len(found))
