"""Bandwidth and latency of every pair of nodes in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron.doctor.findings import Link, Links, NodeFinding, Pair, slow_links
from megatron.doctor.session import ProbeError, Session, on_all

OVER = ("tcp", "gloo", "nccl")
_SECONDS = 40.0
_MEASURING = 0.2


def measured(sessions: Sequence[Session], over: str) -> tuple[Links, list[NodeFinding]]:
    """The links, and the pairs that cannot connect.

    Args:
        over: ``tcp``, which needs nothing on the nodes, or the backend of torch.distributed.
    """
    links: dict[Pair, Link] = {}
    lost: dict[Pair, NodeFinding] = {}
    names = [session.name for session in sessions]
    by_name = dict(zip(names, sessions, strict=True))

    def measure(pair: Pair) -> None:
        source, target = (by_name[name] for name in pair)
        try:
            link = _by_tcp(source, target) if over == "tcp" else _by_torch(source, target, over)
        except ProbeError as error:
            remedy = "open all ports between the nodes of a run; see routes and /etc/hosts"
            where = " -> ".join(pair)
            lost[pair] = NodeFinding(where, f"connection ({over})", str(error), "it works", remedy)
            return
        before = links.get(pair, link)
        links[pair] = Link(max(link.rate, before.rate), min(link.trip, before.trip))

    with ThreadPoolExecutor(max(1, len(names))) as pool:
        for pairs in rounds(len(names)):
            list(pool.map(measure, [(names[a], names[b]) for a, b in pairs]))
            list(pool.map(measure, [(names[b], names[a]) for a, b in pairs]))
    # What was slow because of other work is not slow three times, alone.
    for _ in range(3):
        for pair in slow_links(links):
            measure(pair)
    return links, [lost[pair] for pair in sorted(lost.keys() - links.keys())]


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
