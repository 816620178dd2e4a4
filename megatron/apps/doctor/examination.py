"""Examination of each node by itself, and of the network between each pair in both directions."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from megatron.apps.doctor.findings import (
    Check,
    Link,
    Links,
    NodeFinding,
    Pair,
    checks_of,
    judge_clocks,
    judge_links,
    judge_lost,
    judge_reports,
    peers_of,
    slow_links,
)
from megatron.apps.doctor.session import ProbeError, Session, on_all

OVER = ("tcp", "gloo", "nccl")
_LINK_SECONDS = 40.0
_MEASURING = 0.2
_SEVERAL = 3  # a node is left out once it cannot connect to this many others
_FEW, _TIMES = 4, 3  # links of a slow node to measure again, and repetitions


def measured(sessions: Sequence[Session], over: str) -> tuple[Links, list[NodeFinding]]:
    """Measure the links between nodes. Return the links, and findings about nodes and pairs that
    cannot connect. A node that cannot connect to several others is left out of later rounds, since
    each attempt may take seconds.

    Args:
        over: ``tcp``, which needs no software on the nodes, or a backend of torch.distributed.
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
    # Measure slow links again, one at a time: other work may have slowed them down.
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
    """Add nodes to ``left_out`` that cannot connect to several of the remaining nodes."""
    while True:
        peers = peers_of(pair for pair in lost if left_out.isdisjoint(pair))
        name = max(peers, key=lambda one: len(peers[one]), default="")
        if not name or len(peers[name]) < _SEVERAL:
            return
        left_out.add(name)


def _again(slow: Sequence[Pair], tried: Mapping[Pair, int]) -> list[Pair]:
    """Return the pairs to measure again: a few for each node, as long as they stay slow."""
    taken: Counter[str] = Counter()
    chosen = []
    for pair in sorted(slow, key=lambda pair: -tried[pair]):
        if all(taken[name] < _FEW for name in pair):
            taken.update(pair)
            if tried[pair] < _TIMES:
                chosen.append(pair)
    return chosen


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair of ``count`` players once, in rounds in which each player plays once."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        players.insert(1, players.pop())


def _by_tcp(source: Session, target: Session) -> Link:
    port = target.ask("listen", _LINK_SECONDS, port=0)
    try:
        return Link(
            **source.ask("send", _LINK_SECONDS, host=target.name, port=port, seconds=_MEASURING)
        )
    finally:
        target.ask("close", _LINK_SECONDS)


def _by_torch(source: Session, target: Session, backend: str) -> Link:
    port = source.ask("store", _LINK_SECONDS)

    answers, errors = on_all(
        [source, target],
        lambda session: session.ask(
            "meet", 2 * _LINK_SECONDS, backend=backend, host=source.name, port=port,
            rank=int(session is target), seconds=_MEASURING,
        ),
    )  # fmt: skip
    if errors:
        raise ProbeError("; ".join(f"{name}: {error}" for name, error in errors.items()))
    return Link(**answers[source.name])


PACKAGES = ("torch", "deepspeed", "numpy", "safetensors")
_SECONDS = 20.0
_LOOKING = 5.0


@dataclass(frozen=True)
class Subject:
    """A run's requirements on its nodes.

    Attributes:
        folder: folder of this project on every node.
        data: files that every node reads.
        save: folder that all nodes share. None if not given.
        port: rendezvous port on the first node.
        free_gib: GiB that must be free where training writes.
        over: how to measure the links: tcp, or a backend of torch.distributed.
        interface: GLOO_SOCKET_IFNAME, if it is set where the run is launched.
    """

    folder: str
    data: Sequence[str]
    save: str | None
    port: int
    free_gib: float
    over: str = "tcp"
    interface: str = ""


@dataclass
class Examination:
    """Result of examining nodes: checks, findings, and measurements of every pair of nodes."""

    checks: list[Check] = field(default_factory=list)
    findings: list[NodeFinding] = field(default_factory=list)
    links: Links = field(default_factory=dict)


def examine(sessions: Sequence[Session], subject: Subject) -> Examination:
    """Examine nodes on which probes have been started."""
    done = Examination()
    _, lost = on_all(sessions, lambda session: session.ready(_SECONDS))
    done.findings += [_silent(name, reason) for name, reason in lost.items()]
    present = [session for session in sessions if session.name not in lost]
    places = [subject.save] if subject.save else []
    reports, lost = on_all(
        present,
        lambda session: session.ask(
            "report", 3 * _SECONDS, folder=subject.folder, packages=list(PACKAGES),
            data=list(subject.data), places=places, interface=subject.interface,
        ),
    )  # fmt: skip
    done.findings += [_silent(name, reason) for name, reason in lost.items()]
    present = [session for session in present if session.name in reports]
    done.checks += checks_of(reports)
    done.findings += judge_reports(reports, subject.free_gib)
    offsets, _ = on_all(present, _offset)
    done.findings += judge_clocks(offsets)
    apart = f"{len(offsets)} nodes" if len(offsets) > 1 else ""
    done.checks.append(Check("clocks", apart, ("clock",)))
    if present and present[0] is sessions[0]:
        done.checks.append(Check("port", str(subject.port), ("port ",)))
        done.findings += _port(present, subject.port)
    if len(present) > 1:
        if subject.save:
            folders = {
                name: report["places"][subject.save]["folder"] for name, report in reports.items()
            }
            done.findings += _shared(present, subject.save, folders)
        done.links, unconnected = measured(present, subject.over)
        pairs = f"{len(done.links)} between {len(present)} nodes"
        done.checks.append(Check("links", pairs, ("connection", "bandwidth", "latency")))
        done.findings += [*unconnected, *judge_links(done.links)]
    return done


def _silent(name: str, reason: str) -> NodeFinding:
    remedy = "see whether Python starts there, and the load of the machine"
    return NodeFinding(name, "probe", reason, "it answers", remedy)


def _offset(session: Session) -> tuple[float, float]:
    """Return the offset of a node's clock, and the error of this measurement, from the fastest of
    several round trips."""
    tries = []
    for _ in range(5):
        before = time.time()
        there = session.ask("clock", _SECONDS)
        after = time.time()
        tries.append(((after - before) / 2, there - (before + after) / 2))
    error, offset = min(tries)
    return offset, error


def _port(sessions: Sequence[Session], port: int) -> Iterator[NodeFinding]:
    """Yield findings about whether the rendezvous port is free and reachable."""
    first, *others = sessions
    what = f"port {port} of {first.name}"
    try:
        first.ask("listen", _SECONDS, port=port)
    except ProbeError as error:
        remedy = "end what listens there (ss -ltnp), or give another --master-port"
        yield NodeFinding(first.name, f"port {port}", str(error), "free", remedy)
        return
    _, errors = on_all(
        others, lambda one: one.ask("connect", _SECONDS, host=first.name, port=port, seconds=4)
    )
    with suppress(ProbeError):
        first.ask("close", _SECONDS)
    if others and len(errors) == len(others):
        reason = f"no other node reaches it: {next(iter(errors.values()))}"
        remedy = "open it in the firewall of the node, or give another --master-port"
        yield NodeFinding(first.name, f"port {port}", reason, "reachable", remedy)
        return
    for name, reason in errors.items():
        remedy = "open it in the firewall between the nodes; see /etc/hosts or DNS of this one"
        yield NodeFinding(name, what, reason, "reachable", remedy)


def _shared(
    sessions: Sequence[Session], path: str, folders: dict[str, str]
) -> Iterator[NodeFinding]:
    """Yield findings about whether all nodes see a file that one node writes and locks."""
    deepest = max(folders.values(), key=len)
    where = f"folder {path}"
    owners = [session for session in sessions if folders[session.name] == deepest]
    for name, folder in folders.items():
        if folder != deepest:
            value, remedy = "missing", "mount the file system there, as on the other nodes"
            yield NodeFinding(name, where, value, "every node sees it", remedy)
    first, *others = owners
    name = f".doctor-{secrets.token_hex(8)}"
    try:
        reason = first.ask("mark", _SECONDS, folder=deepest, name=name)
        seen, errors = on_all(
            others,
            lambda one: one.ask("look", _SECONDS, folder=deepest, name=name, seconds=_LOOKING),
        )
    except ProbeError:
        return  # the node's report has already said so
    finally:
        with suppress(ProbeError):
            first.ask("unmark", _SECONDS)
    unlocked = {first.name: f"without locks: {reason}"} if reason else {}
    for other, value in {**unlocked, **seen, **errors}.items():
        if value.startswith("without locks"):
            remedy = "mount it with locks of all nodes (Lustre: -o flock), or choose another folder"
            if other == first.name or not reason:
                yield NodeFinding(other, where, value, "locks that count on all nodes", remedy)
        elif value == "not locked" and not reason:
            remedy = "mount it with locks on all nodes (NFS: without nolock or local_lock)"
            right = f"the lock of {first.name} counts"
            yield NodeFinding(other, where, "a lock of another node is not seen", right, remedy)
        elif value not in ("locked", "not locked"):
            value = f"does not see what {first.name} writes there" if value == "not seen" else value
            remedy = "mount the same file system on all nodes, or choose a shared folder"
            yield NodeFinding(other, where, value, "shared", remedy)
