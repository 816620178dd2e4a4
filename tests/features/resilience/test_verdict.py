"""Who holds a run up, by what its ranks say."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.features.resilience.watch.reports import Report, Silent
from megatron.features.resilience.watch.verdict import (
    LIMIT,
    LOST,
    SIGNAL,
    HangQuestion,
    HangVerdict,
    judge,
)

STOPPED = "is stopped (state T: SIGSTOP, Ctrl-Z or a debugger)"


def report(rank: int, waits: bool, idle: int = 100, **others: Any) -> Report:
    values: dict[str, Any] = {
        "host": "node-1", "pid": 1000 + rank, "phase": "step", "detail": "", "iteration": 7,
        "limit": 60, "site": "all_reduce in mesh.py" if waits else "loop in model.py",
    }  # fmt: skip
    return Report(rank=rank, idle=idle, waits=waits, **{**values, **others})


def waiting(rank: int, **others: Any) -> Report:
    return report(rank, True, **others)


def working(rank: int, **others: Any) -> Report:
    return report(rank, False, **others)


def silent(rank: int, state: str = "", host: str = "node-1") -> Silent:
    return Silent(rank, host, 1000 + rank, "step", 7, state)


BROKEN = {"error": "Connection reset by peer", "lost": True, "status": 3}
CASES: dict[str, tuple[list[Report], list[Silent], str, tuple[int, ...], str]] = {
    "one works, the others wait": (
        [waiting(0), working(1), waiting(2)], [], LIMIT, (1,),
        "rank 1 (node-1, pid 1001) has not advanced for 100 s in phase step at iteration 7: loop "
        "in model.py; ranks 0, 2 wait for others in all_reduce in mesh.py",
    ),
    "two work": ([working(0), working(1)], [], LIMIT, (0, 1), "rank 0 (node-1, pid 1000) has not"),
    "one is late, another is not yet": (
        [working(0, idle=10), working(1), waiting(2)], [], LIMIT, (1,), "rank 1 (node-1, pid 1001)",
    ),
    "one waits for a file": (
        [waiting(0), working(1, waited_for="fsync of /data/x")], [], LIMIT, (1,),
        "in phase step at iteration 7, waiting for fsync of /data/x: loop in model.py; rank 0 "
        "waits",
    ),
    "one is stopped": (
        [waiting(0)], [silent(1, STOPPED)], LIMIT, (1,),
        "rank 1 (node-1, pid 1001) does not answer: its process is stopped (state T: SIGSTOP, "
        "Ctrl-Z or a debugger), last seen in phase step at iteration 7; rank 0 waits for others",
    ),
    "one is stopped, another works": (
        [working(0), waiting(2)], [silent(1, STOPPED)], LIMIT, (1,), "its process is stopped",
    ),
    "one has ended": (
        [waiting(0, **BROKEN)], [silent(1, "has ended")], LOST, (1,),
        "rank 1 (node-1, pid 1001) has ended, last seen in phase step at iteration 7",
    ),
    "one holds the interpreter's lock": (
        [waiting(0)], [silent(1, "sleeps")], LIMIT, (1,), "a library holds the interpreter's lock",
    ),
    "a machine is gone": (
        [waiting(0)], [silent(1, host="node-2")], LIMIT, (1,),
        "nor does any other on node-2: machine or network is gone",
    ),
    "a rank whose machine answers": (
        [waiting(0), waiting(2, host="node-2")], [silent(1, host="node-2")], LIMIT, (1,),
        "rank 1 (node-2, pid 1001) does not answer, last seen",
    ),
    "an error of its own": (
        [waiting(0, **BROKEN), working(1, error="out of memory", status=1)], [], LOST, (1,),
        "rank 1 (node-1, pid 1001) has ended: out of memory",
    ),
    "an error of its own, and one that is silent": (
        [working(1, error="out of memory", status=1)], [silent(0)], LOST, (1,), "out of memory",
    ),
    "a connection that broke": (
        [waiting(0, **BROKEN), waiting(1, host="node-2")], [], LOST, (),
        "all ranks answer, but a connection between them failed (network of node-1, node-2): rank "
        "0 (node-1, pid 1000): Connection reset by peer",
    ),
    "one is a step behind": (
        [waiting(0), waiting(1, iteration=6, site="recv in pipe.py"), waiting(2)], [], LIMIT, (1,),
        "rank 1 (node-1, pid 1001) waits in phase step at iteration 6: recv in pipe.py; ranks 0, 2",
    ),
    "one is in another phase": (
        [waiting(0), waiting(1, phase="save"), waiting(2)], [], LIMIT, (1,),
        "rank 1 (node-1, pid 1001) waits in phase save at iteration 7",
    ),
    "different calls": (
        [waiting(0), waiting(1, site="broadcast in mesh.py"), waiting(2)], [], LIMIT, (1,),
        "all ranks wait for each other in phase step at iteration 7, in different calls: ranks 0, "
        "2 in all_reduce in mesh.py; rank 1 in broadcast in mesh.py",
    ),
    "the same call": (
        [waiting(0), waiting(1, host="node-2")], [], LIMIT, (),
        "all 2 ranks wait for each other in phase step at iteration 7, in all_reduce in mesh.py: a "
        "transfer between them does not arrive (network of node-1, node-2)",
    ),
    "one hangs, and the devices of the others wait for its": (
        [working(0, device=True, site="item"), working(1), working(2, device=True)], [], LIMIT,
        (1,), "rank 1 (node-1, pid 1001) has not advanced for 100 s in phase step at iteration 7: "
        "loop in model.py; ranks 0, 2 wait for what is queued on their devices",
    ),
    "one hangs in a phase with a longer limit": (
        [working(0, device=True), working(1, phase="data", limit=90)], [], LIMIT, (1,),
        "rank 1 (node-1, pid 1001) has not advanced for 100 s in phase data",
    ),
    "one is stopped, and a device waits for its": (
        [working(0, device=True)], [silent(1, STOPPED)], LIMIT, (1,),
        "last seen in phase step at iteration 7; rank 0 waits for what is queued on its device",
    ),
    "all devices wait": (
        [working(0, device=True), waiting(1, iteration=6), working(2, device=True)], [], LIMIT, (),
        "all 3 ranks wait, ranks 0, 2 for what is queued on their devices: a transfer or a kernel",
    ),
    "a device of one's own": (
        [working(0, device=True)], [], LIMIT, (0,), "rank 0 (node-1, pid 1000) has not advanced",
    ),
    "a signal that a step does not let through": (
        [waiting(0), working(1, idle=12)], [], SIGNAL, (1,), "rank 1 (node-1, pid 1001) has not",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("reports", "quiet", "reason", "ranks", "said"), CASES.values(), ids=list(CASES)
)
def test_the_right_rank_is_named(
    reports: list[Report], quiet: list[Silent], reason: str, ranks: tuple[int, ...], said: str
) -> None:
    question = HangQuestion(reason, 10)
    verdict = judge({r.rank: r for r in reports}, quiet, question)
    assert verdict.ends and verdict.ranks == ranks
    assert said in verdict.line
    assert HangVerdict.of_json(verdict.to_json()) == verdict


@pytest.mark.parametrize(
    ("reports", "reason", "again"),
    [
        ([waiting(0), working(1, idle=20)], LIMIT, 40),
        ([waiting(0), working(1, phase="start", limit=3600)], LIMIT, 3500),
        ([waiting(0), working(1, limit=0)], LIMIT, 60),
        ([waiting(0), working(1, idle=59), working(2, idle=10)], LIMIT, 2),
        ([waiting(0), working(1, idle=3)], SIGNAL, 7),
        ([waiting(0), working(1, phase="save", idle=12)], SIGNAL, 48),
        ([working(0, device=True), working(1, phase="save", limit=900)], LIMIT, 800),
        ([working(n, device=True, phase="evaluation", limit=400) for n in (0, 1)], LIMIT, 300),
    ],
    ids=[
        "works", "builds an index", "no limit", "soon", "signal", "a save after a signal",
        "a save that a device waits for", "an evaluation on devices",
    ],
)  # fmt: skip
def test_a_rank_that_works_within_its_limit_is_let_be(
    reports: list[Report], reason: str, again: int
) -> None:
    verdict = judge({r.rank: r for r in reports}, [], HangQuestion(reason, 10))
    assert (verdict.ends, verdict.ranks, verdict.again) == (False, (), again)


def test_a_run_whose_ranks_all_answer_without_an_error_is_let_be() -> None:
    """What another rank could not reach for some seconds answers again."""
    found = judge({n: waiting(n) for n in (0, 1)}, [], HangQuestion(LOST))
    assert not found.ends and found.again > 0


def test_ranks_that_end_by_their_own_error_keep_its_status() -> None:
    failed = working(1, error="--lr must be a number", status=2)
    verdict = judge({0: waiting(0), 1: failed}, [], HangQuestion(LOST))
    assert verdict.by_error and verdict.status == 2
    assert judge({0: waiting(0)}, [silent(1)], HangQuestion(LOST)).status == 3


def test_many_ranks_make_one_short_line() -> None:
    ranks = {rank: waiting(rank) for rank in range(500)}
    line = judge(ranks, [silent(rank) for rank in range(500, 1000)], HangQuestion(LIMIT)).line
    assert "; and 496 more" in line and "and 492 more wait for others" in line
    assert len(line) < 600
