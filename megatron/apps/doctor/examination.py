"""The examination of nodes: who answers, what each is, and what lies between them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megatron.apps.doctor.findings import (
    Check,
    Links,
    NodeFinding,
    checks_of,
    judge_clocks,
    judge_links,
    judge_reports,
)
from megatron.apps.doctor.links import measured
from megatron.apps.doctor.session import (
    ProbeError,
    Session,
    on_all,
)

PACKAGES = ("torch", "deepspeed", "numpy", "safetensors")
_SECONDS = 20.0
_LOOKING = 5.0


@dataclass(frozen=True)
class Subject:
    """What a run will need.

    Attributes:
        folder: of this project, on every node.
        data: files that every node reads.
        save: a folder that all nodes share, if one is named.
        port: at which the processes meet on the first node.
        free_gib: to be free where training writes.
        over: what measures the links: tcp, or a backend of torch.distributed.
        interface: GLOO_SOCKET_IFNAME, where the side that starts the processes says it.
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
    """Checks, their findings, and measurements of every pair of nodes."""

    checks: list[Check] = field(default_factory=list)
    findings: list[NodeFinding] = field(default_factory=list)
    links: Links = field(default_factory=dict)


def examine(sessions: Sequence[Session], subject: Subject) -> Examination:
    """All checks of nodes whose probes have been started."""
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
    """Of the shortest of several round trips."""
    tries = []
    for _ in range(5):
        before = time.time()
        there = session.ask("clock", _SECONDS)
        after = time.time()
        tries.append(((after - before) / 2, there - (before + after) / 2))
    error, offset = min(tries)
    return offset, error


def _port(sessions: Sequence[Session], port: int) -> Iterator[NodeFinding]:
    """Whether the others reach the port at which ranks meet."""
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
    """Whether a file that one node writes is seen by all, with its lock."""
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
        return  # its report has said that it cannot write
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
