"""Judgement of which ranks block a run, from the reports of its ranks and the silence of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.features.resilience.watch.processes import GONE
from megatron.features.resilience.watch.reports import Report, Silent
from megatron.util.errors import RESTART_STATUS

LIMIT, SIGNAL, LOST = "limit", "signal", "lost"
"""Reasons for a question: no progress within the limit; signal not obeyed; lost ranks or
connections."""

_SHOWN = 4
_SOON = 2  # minimum ticks between two questions
_NO_LIMIT = 60  # ticks granted to a rank whose phase has no limit, before the next question


@dataclass(frozen=True)
class HangQuestion:
    """Question from a rank to the others. ``grace`` is the number of ticks without progress that a
    working rank is allowed after a signal."""

    reason: str
    grace: int = 0


@dataclass(frozen=True)
class HangVerdict:
    """Answer to a question.

    Attributes:
        ranks: ranks that block the run; empty if they are unknown.
        line: message for users.
        ends: True if the run ends. If False, the ranks may ask again after ``again`` ticks.
        status: exit code.
        by_error: True if a rank has ended with its own error.
    """

    ranks: tuple[int, ...]
    line: str
    ends: bool = True
    again: int = 0
    status: int = RESTART_STATUS
    by_error: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> HangVerdict:
        return cls(**{**found, "ranks": tuple(found["ranks"])})


def judge(
    reports: Mapping[int, Report], silent: Sequence[Silent], question: HangQuestion
) -> HangVerdict:
    """Judge which ranks block a run, from the reports of some ranks and the silence of others. They
    are, in this order: ranks that end with their own error; silent ranks; ranks that work while
    others wait; ranks behind the others; ranks that wait in different calls."""
    failed = [r for r in reports.values() if r.error and not r.lost]
    if failed:
        line = _listed([f"{r.name} has ended: {r.error}" for r in failed])
        return HangVerdict(_ranks(failed), line, status=failed[0].status, by_error=True)
    if silent:
        return HangVerdict(tuple(s.rank for s in silent), _of_silent(silent, reports))
    if question.reason == LOST:
        return _lost(reports)
    waiting = [r for r in reports.values() if r.waits or (r.device and len(reports) > 1)]
    working = {r.rank: _left(r, question) for r in reports.values() if r not in waiting}
    late = [reports[rank] for rank, left in working.items() if left <= 0]
    if late:
        return HangVerdict(_ranks(late), _of_late(late, waiting))
    # A busy device may be running a long computation.
    lefts = [*working.values()] or [_left(r, question) for r in waiting if not r.waits]
    if any(left > 0 for left in lefts):
        again = min(max(_SOON, left) for left in lefts if left > 0)
        return HangVerdict((), "", ends=False, again=again)
    return _all_wait(waiting)


def _left(report: Report, question: HangQuestion) -> int:
    """Return the number of ticks for which a working rank may still continue without progress."""
    limit = report.limit or report.idle + _NO_LIMIT
    if question.reason == SIGNAL and report.phase in ("step", "data", "evaluation"):
        limit = min(limit, question.grace)
    return limit - report.idle


def _lost(reports: Mapping[int, Report]) -> HangVerdict:
    """Return the verdict about failed connections when every rank answers."""
    failed = [r for r in reports.values() if r.error]
    if not failed:  # the connection has recovered
        return HangVerdict((), "", ends=False, again=_SOON)
    hosts = sorted({r.host for r in reports.values()})
    line = f"all ranks answer, but a connection between them failed (network of {', '.join(hosts)})"
    return HangVerdict((), f"{line}: {failed[0].name}: {failed[0].error}")


def _of_silent(silent: Sequence[Silent], reports: Mapping[int, Report]) -> str:
    hosts = {r.host for r in reports.values()}
    said = []
    for one in silent:
        if one.state == GONE:
            what = "has ended"
        elif one.state and one.state.startswith(("runs", "sleeps")):
            what = (
                f"does not answer: its process {one.state}, but none of its Python code does (a "
                "library holds the interpreter's lock)"
            )
        elif one.state:
            what = f"does not answer: its process {one.state}"
        elif one.host and one.host not in hosts:
            what = f"does not answer, nor does any other on {one.host}: machine or network is gone"
        else:
            what = "does not answer"
        last = f", last seen in phase {one.phase}" if one.phase else ", never seen"
        if one.iteration:
            last += f" at iteration {one.iteration}"
        said.append(f"{one.name} {what}{last}")
    return _listed(said) + _waiting([r for r in reports.values() if r.waits or r.device])


def _of_late(late: Sequence[Report], waiting: Sequence[Report]) -> str:
    said = []
    for one in late:
        what = f"{one.name} has not advanced for {one.idle} s in {one.place}"
        if one.waited_for:
            what += f", waiting for {one.waited_for}"
        elif one.detail:
            what += f" ({one.detail})"
        said.append(f"{what}: {one.site}" if one.site else what)
    return _listed(said) + _waiting(waiting)


def _all_wait(waiting: Sequence[Report]) -> HangVerdict:
    if any(r.device and not r.waits for r in waiting):
        # Ranks run ahead of their devices, so their positions do not show which one is behind.
        nodes = ", ".join(sorted({r.host for r in waiting})[:_SHOWN])
        line = (
            f"all {len(waiting)} ranks wait, {_named([r for r in waiting if r.device])} for what "
            f"is queued on their devices: a transfer or a kernel does not end ({nodes}); the "
            "collectives that each has recorded tell whose"
        )
        return HangVerdict((), line)
    places = Counter((r.iteration, r.phase) for r in waiting)
    if len(places) > 1:
        first = min(r.iteration for r in waiting)
        behind = [r for r in waiting if r.iteration == first]
        if len(behind) == len(waiting):
            usual = places.most_common(1)[0][0]
            behind = [r for r in waiting if (r.iteration, r.phase) != usual]
        said = [f"{r.name} waits in {r.place}: {r.site}" for r in behind]
        others = [r for r in waiting if r not in behind]
        return HangVerdict(_ranks(behind), _listed(said) + _waiting(others))
    sites: dict[str, list[Report]] = {}
    for report in waiting:
        sites.setdefault(report.site, []).append(report)
    where = waiting[0].place
    if len(sites) > 1:
        said = [f"{_named(ranks_there)} in {site}" for site, ranks_there in sites.items()]
        line = f"all ranks wait for each other in {where}, in different calls: {_listed(said)}"
        fewest = min(len(ranks_there) for ranks_there in sites.values())
        culprits = [
            r for ranks_there in sites.values() if len(ranks_there) == fewest for r in ranks_there
        ]
        return HangVerdict(_ranks(culprits), line)
    hosts = sorted({r.host for r in waiting})
    line = (
        f"all {len(waiting)} ranks wait for each other in {where}, in {waiting[0].site}: a "
        f"transfer between them does not arrive (network of {', '.join(hosts[:_SHOWN])})"
    )
    return HangVerdict((), line)


def _waiting(reports: Sequence[Report]) -> str:
    if not reports:
        return ""
    verb = "waits" if len(reports) == 1 else "wait"
    if all(r.device and not r.waits for r in reports):
        whose = "its device" if len(reports) == 1 else "their devices"
        return f"; {_named(reports)} {verb} for what is queued on {whose}"
    site = f" in {reports[0].site}" if len({r.site for r in reports}) == 1 else ""
    return f"; {_named(reports)} {verb} for others{site}"


def _named(reports: Sequence[Report]) -> str:
    ranks = sorted(r.rank for r in reports)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 2 * _SHOWN} more" if len(ranks) > 2 * _SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[: 2 * _SHOWN]))}{more}"


def _listed(said: Sequence[str]) -> str:
    more = len(said) - _SHOWN
    return "; ".join(said[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _ranks(reports: Sequence[Report]) -> tuple[int, ...]:
    return tuple(r.rank for r in reports)
