"""Complete check of a run at its full size, and the check's report."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.apps.parity.symbolic.groups import Fault
from megatron.apps.parity.symbolic.miniature import MOST_RANKS, Miniature, axes_of, miniature
from megatron.apps.parity.symbolic.simulate import simulate
from megatron.apps.parity.symbolic.sizes import check_groups, check_shares
from megatron.apps.parity.symbolic.trace import check_program
from megatron.config import Setting, Settings
from megatron.run.run import run_of


@dataclass
class RunReport:
    """Result of a check. ``fault`` describes the first difference, or is None."""

    ranks: int
    axes: dict[str, int]
    fault: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return self.fault is None


def check_run(
    settings: Settings,
    ranks: int,
    most: int = MOST_RANKS,
    say: Callable[[str], None] = lambda line: None,
) -> RunReport:
    """Check the run that ``settings`` describe on ``ranks`` processes. At most ``most`` ranks are
    simulated with values. Raises ValueError if the settings are invalid."""
    began = time.process_time()
    run = run_of(dict(settings), ranks)
    report = RunReport(ranks, axes_of(run.config))
    say(f"{ranks} ranks: {run.config.parallel.in_words()}")
    small = miniature(settings, run, most)
    off = {name: Setting(0.0, "check") for name in ("hidden_dropout", "attention_dropout")}
    whole = run_of(settings | off, ranks)
    parts: Sequence[tuple[str, Callable[[], dict[str, Any]]]] = (
        ("groups and schedule", lambda: check_groups(run.config)),
        ("shares of parameters", lambda: check_shares(run)),
        ("a step on simulated ranks", lambda: _stepped(small)),
        ("programs of ranks at this size", lambda: check_program(whole, small.run)),
    )
    for title, part in parts:
        try:
            numbers = part()
        except Fault as error:
            report.fault = f"{title}: {error}"
            break
        report.numbers |= numbers
        say(f"{title}: {_shown(numbers)}")
    report.seconds = time.process_time() - began
    report.numbers["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return report


def _stepped(small: Miniature) -> dict[str, Any]:
    result = simulate(small.run, small.plain)
    numbers: dict[str, Any] = {
        "simulated ranks": result.ranks,
        "micro batches of a rank": result.micro_batches,
        "collectives": result.collectives,
        "tensors compared": result.tensors,
    }
    for axis, (of, to) in small.changed.items():
        numbers[f"ranks along {axis}"] = f"{to} of {of}"
    return numbers


def _shown(numbers: dict[str, Any]) -> str:
    return ", ".join(f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}"
                     for name, value in numbers.items())  # fmt: skip
