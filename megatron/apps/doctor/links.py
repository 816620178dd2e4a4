"""Bandwidth and latency of every pair of nodes in both directions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron.apps.doctor.findings import (
    Link,
    Links,
    NodeFinding,
    Pair,
    judge_lost,
    peers_of,
    slow_links,
)
from megatron.apps.doctor.session import (
    ProbeError,
    Session,
    on_all,
)

OVER = ("tcp", "gloo", "nccl")
_SECONDS = 40.0
_MEASURING = 0.2
_SEVERAL = 3
"""Other nodes with which one that is left out has failed."""
_FEW, _TIMES = 4, 3
"""Links of a slow node that are measured again, and how often."""


def measured(sessions: Sequence[Session], over: str) -> tuple[Links, list[NodeFinding]]:
    """The links, and the nodes and pairs that cannot connect.

    A node that fails with several others is left out from then on: each try may take seconds.

    Args:
        over: ``tcp``, which needs nothing on the nodes, or the backend of torch.distributed.
    """
    links: dict[Pair, Link] = {}
    lost: dict[Pair, str] = {}
    left_out: set[str] = set()
    names = [session.name for session in sessions]
    by_name = dict(zip(names, sessions, strict=True))

    def measure(pair: Pair) -> None:
        source, target = (by_name[name] for name in pair)
        try:
            link = _by_tcp(source, target) if over == "tcp" else _by_torch(source, target, over)
        except ProbeError as error:
            lost[pair] = str(error)
            return
        before = links.get(pair, link)
        links[pair] = Link(max(link.rate, before.rate), min(link.trip, before.trip))

    with ThreadPoolExecutor(max(1, len(names))) as pool:
        for numbers in rounds(len(names)):
            pairs = [(names[a], names[b]) for a, b in numbers]
            pairs = [pair for pair in pairs if left_out.isdisjoint(pair)]
            list(pool.map(measure, pairs))
            list(pool.map(measure, [(b, a) for a, b in pairs]))
            _leave_out(lost, left_out)
    # What was slow because of other work is not slow three times more, alone.
    tried: Counter[Pair] = Counter()
    while pairs := _again(slow_links(links), tried):
        for pair in pairs:
            measure(pair)
            tried[pair] += 1
    order = {name: number for number, name in enumerate(names)}
    unconnected = sorted(lost.keys() - links.keys(), key=lambda pair: [order[n] for n in pair])
    met = peers_of([*links, *lost])
    untried = {name for name in left_out if len(met[name]) < len(names) - 1}
    return links, judge_lost({pair: lost[pair] for pair in unconnected}, untried, over)


def _leave_out(lost: Mapping[Pair, str], left_out: set[str]) -> None:
    """Adds the nodes that have failed with several of the others that are left."""
    while True:
        peers = peers_of(pair for pair in lost if left_out.isdisjoint(pair))
        name = max(peers, key=lambda one: len(peers[one]), default="")
        if not name or len(peers[name]) < _SEVERAL:
            return
        left_out.add(name)


def _again(slow: Sequence[Pair], tried: Mapping[Pair, int]) -> list[Pair]:
    """Those to measure once more: of a node a few, as long as these stay slow."""
    taken: Counter[str] = Counter()
    chosen = []
    for pair in sorted(slow, key=lambda pair: -tried[pair]):
        if all(taken[name] < _FEW for name in pair):
            taken.update(pair)
            if tried[pair] < _TIMES:
                chosen.append(pair)
    return chosen


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of so many players once; nobody twice in a round."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        players.insert(1, players.pop())


def _by_tcp(source: Session, target: Session) -> Link:
    port = target.ask("listen", _SECONDS, port=0)
    try:
        return Link(**source.ask("send", _SECONDS, host=target.name, port=port, seconds=_MEASURING))
    finally:
        target.ask("close", _SECONDS)


def _by_torch(source: Session, target: Session, backend: str) -> Link:
    port = source.ask("store", _SECONDS)

    def meet(session: Session) -> dict[str, float]:
        answer: dict[str, float] = session.ask(
            "meet", 2 * _SECONDS, backend=backend, host=source.name, port=port,
            rank=int(session is target), seconds=_MEASURING,
        )  # fmt: skip
        return answer

    answers, errors = on_all([source, target], meet)
    if errors:
        raise ProbeError("; ".join(f"{name}: {error}" for name, error in errors.items()))
    return Link(**answers[source.name])
