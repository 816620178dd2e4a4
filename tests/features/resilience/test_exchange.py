"""What ranks know of each other, through a store in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from megatron.features.resilience.watch import exchange
from megatron.features.resilience.watch.exchange import RankExchange
from megatron.features.resilience.watch.processes import GONE, process_space
from megatron.features.resilience.watch.reports import Report
from megatron.features.resilience.watch.verdict import LOST, HangQuestion


def report(rank: int) -> Report:
    return Report(rank, "node", 100 + rank, "step", "", 7, 100, 60, True, "all_reduce")


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankExchange]:
    """The exchange of rank 0 of two, before it is started; it has a store of its own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(exchange, "PATIENCE", 1.0)
    store = dist.HashStore()
    monkeypatch.setattr(RankExchange, "_connect", lambda self: store)
    monkeypatch.setattr(exchange, "_EVERY", 0.05)
    made = RankExchange(lambda: report(0), 0, 2)
    yield made
    made.stop()


def soon(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 30
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


ENDED = 2**22 + 1
"""No process of this machine: Linux has no such id."""


@pytest.mark.parametrize(("space", "state"), [(process_space(), GONE), ("another container", "")])
def test_an_id_means_something_where_it_was_given_only(first, monkeypatch, space, state):
    """Containers on one machine may have one host name, and each has ids of its own."""
    other = RankExchange(lambda: report(1), 1, 2)
    other._host, other._space = first._host, space
    other._store, other._door = other._connect(), exchange.Door("127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(exchange.os, "getpid", lambda: ENDED)
        other._beat()
    other._door.close()
    first.start()
    first.look_at_neighbours()

    def notices() -> bool:
        return first.take_verdict() is not None or first._question is not None

    if state:
        assert soon(notices)
    else:
        time.sleep(0.5)
        assert not notices()
    first.ask(HangQuestion(LOST))
    verdict = soon(first.take_verdict)
    assert verdict.ranks == (1,) and ("has ended" in verdict.line) == bool(state)
