"""Findings about nodes, derived from their probes' answers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_CLOCKS_APART = 1.0  # maximum difference between clocks, in seconds
LEAST_FILES = 4096
LEAST_SHM = 2**28
_LEAST_INODES = 0.01
_GIB = 2**30
SLOW = 0.25  # a link is reported below this fraction of the median bandwidth
FAR = 10.0  # a link is reported above this multiple of the median latency if it is also 1 ms more
_LEAST_TRIP = 1e-3
_NAMED = 3  # maximum number of unreachable nodes listed in a finding
Reports = Mapping[str, Mapping[str, Any]]
Pair = tuple[str, str]  # sender, receiver


class Link(NamedTuple):
    """Link from one node to another: bytes per second, and round-trip time in seconds."""

    rate: float
    trip: float


Links = Mapping[Pair, Link]


@dataclass(frozen=True)
class NodeFinding:
    """A fault: the node (or two names with an arrow for a link), the check, the value found, the
    expected value, and the remedy."""

    node: str
    check: str
    value: str
    right: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.node}: {self.check}: {self.value} ({self.right}); {self.remedy}"


def judge_reports(reports: Reports, free_gib: float) -> list[NodeFinding]:
    """Return the findings about each node, by itself and compared with the other nodes."""
    findings = [*_versions(reports), *_code(reports), *_data(reports)]
    for name, report in reports.items():
        findings += [*_places(name, report["places"], free_gib), *_limits(name, report)]
        if len(reports) > 1:
            findings += _address(name, report)
        findings += _gpus(name, report["gpus"])
    return [*findings, *_different_gpus(reports)]


class Check(NamedTuple):
    """A completed check: its name, the value on most nodes (empty if it did not apply), and the
    prefixes by which its findings are recognised."""

    name: str
    value: str
    findings: tuple[str, ...]


def checks_of(reports: Reports) -> list[Check]:
    """Return the checks that the nodes' reports cover."""
    if not reports:
        return []
    first = next(iter(reports.values()))
    versions = [f"Python {first['python']}"]
    versions += [f"{name} {version or 'missing'}" for name, version in first["packages"].items()]
    places = [
        f"{path} ({min(r['places'][path]['free'] for r in reports.values()) / _GIB:,.1f} GiB free)"
        for path in first["places"]
    ]
    kinds = usual({name: _kinds(report["gpus"]["rows"]) for name, report in reports.items()})
    shm = first["shm"]
    memory = f"{shm / _GIB:,.1f} GiB" if shm is not None else ""
    limit = "unlimited" if first["nofile"] < 0 else f"at most {first['nofile']:,}"
    data = f"{len(first['data'])} files" if first["data"] else ""
    return [
        Check("versions", ", ".join(versions), ("version of",)),
        Check("code", f"{len(first['code'])} files", ("code",)),
        Check("data (--data-path)", data, ("data ",)),
        Check("folders", ", ".join(places), ("folder ",)),
        Check("open files", limit, ("open files",)),
        Check("/dev/shm", memory, ("/dev/shm",)),
        Check("GPUs", kinds, ("GPU", "driver of")),
    ]


def usual(values: Mapping[Any, Any]) -> Any:
    """Return the most common value, in a tie the one that occurs first."""
    return Counter(values.values()).most_common(1)[0][0]


def _odd(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (node, its value, the usual value) for each node that differs from most."""
    if values:
        most = usual(values)
        yield from ((name, value, most) for name, value in values.items() if value != most)


def _versions(reports: Reports) -> Iterator[NodeFinding]:
    for name, mine, most in _odd({name: report["python"] for name, report in reports.items()}):
        remedy = "use the same environment on every node"
        yield NodeFinding(name, "version of Python", mine, f"{most} on the other nodes", remedy)
    for package in next(iter(reports.values()), {}).get("packages", ()):
        versions = {name: report["packages"][package] for name, report in reports.items()}
        present = {name: version for name, version in versions.items() if version}
        requirement = f"{package}=={usual(present)}" if present else package
        for name in versions:
            if name not in present:
                right = f"{usual(present)} on the other nodes" if present else "training needs it"
                remedy = f"pip install {requirement} there"
                yield NodeFinding(name, f"version of {package}", "not installed", right, remedy)
        for name, mine, most in _odd(present):
            right, remedy = f"{most} on the other nodes", f"pip install {requirement} there"
            yield NodeFinding(name, f"version of {package}", mine, right, remedy)


def _code(reports: Reports) -> Iterator[NodeFinding]:
    codes = {name: tuple(sorted(report["code"].items())) for name, report in reports.items()}
    for name, mine, most in _odd(codes):
        files = sorted({file for file, _ in set(mine) ^ set(most)})
        value = f"{files[0]} differs" + (f", and {len(files) - 1} more files" if files[1:] else "")
        remedy = "check out the same commit there, or share the folder"
        yield NodeFinding(name, "code", value, "the same on every node", remedy)


def _data(reports: Reports) -> Iterator[NodeFinding]:
    for path in next(iter(reports.values()), {}).get("data", ()):
        files = {name: report["data"][path] for name, report in reports.items()}
        present = {name: file for name, file in files.items() if file}
        for name in files:
            if name not in present:
                right, remedy = "every node reads it", "copy or mount it there; see --data-path"
                yield NodeFinding(name, f"data {path}", "cannot be read", right, remedy)
        for name, mine, most in _odd(present):
            right, remedy = f"{most} on the other nodes", "copy the same file there"
            yield NodeFinding(name, f"data {path}", mine, right, remedy)


def _places(name: str, places: Mapping[str, Any], free_gib: float) -> Iterator[NodeFinding]:
    for path, place in places.items():
        where = f"folder {path}"
        if place["free"] < free_gib * _GIB:
            value, right = f"{place['free'] / _GIB:.2f} GiB are free", f"at least {free_gib:g}"
            yield NodeFinding(name, where, value, right, "delete files, or set --free-gib")
        elif place["refused"]:
            remedy = f"let the user of the run write into {place['folder']}, or choose another"
            yield NodeFinding(name, where, place["refused"], "training writes there", remedy)
        if place["inodes"] < _LEAST_INODES:
            value = f"{place['inodes']:.1%} of its inodes are free"
            yield NodeFinding(name, where, value, "at least 1%", "delete small files there")


def _limits(name: str, report: Mapping[str, Any]) -> Iterator[NodeFinding]:
    files, shm = report["nofile"], report["shm"]
    if 0 <= files < LEAST_FILES:
        remedy = "raise nofile in /etc/security/limits.conf, or ulimit -n of the container"
        yield NodeFinding(name, "open files", f"at most {files}", f"at least {LEAST_FILES}", remedy)
    if shm is not None and shm < LEAST_SHM:
        value, remedy = f"{shm / 2**20:.0f} MiB", "give the container --shm-size 8g or --ipc host"
        yield NodeFinding(name, "/dev/shm", value, f"at least {LEAST_SHM / 2**20:.0f} MiB", remedy)
    if report["infiniband"] and report["memlock"] >= 0:
        value = f"{report['memlock']:,} bytes"
        remedy = "ulimit -l unlimited for the user of the run, and in the container"
        yield NodeFinding(name, "locked memory", value, "unlimited for InfiniBand", remedy)


def _address(name: str, report: Mapping[str, Any]) -> Iterator[NodeFinding]:
    if report["own_address"].startswith("127.") and not report["interface"]:
        remedy = "give the name its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME (with a "
        remedy += "hostfile: in .deepspeed_env)"
        right = "an address that other nodes reach"
        yield NodeFinding(name, "address of its own name", report["own_address"], right, remedy)


def _gpus(name: str, gpus: Mapping[str, Any]) -> Iterator[NodeFinding]:
    if gpus["error"]:
        remedy = "see what nvidia-smi prints there; restart the driver or the machine"
        yield NodeFinding(name, "GPUs", gpus["error"].splitlines()[0], "nvidia-smi answers", remedy)
    for line in gpus["xids"]:
        remedy = "look its number up in NVIDIA's list of Xid errors; restart the node, or drain it"
        yield NodeFinding(name, "GPUs", line, "no Xid error of hardware since the start", remedy)
    for gpu in gpus["rows"]:
        where = f"GPU {gpu['index']}"
        errors = gpu["ecc.errors.uncorrected.volatile.total"]
        if errors.isdigit() and int(errors):
            remedy = "drain the node and reset the GPU"
            yield NodeFinding(name, where, f"{errors} uncorrected ECC errors", "0", remedy)
        if gpu["retired_pages.pending"] == "Yes":
            value = "memory pages wait to be retired"
            yield NodeFinding(name, where, value, "no", "restart the node")
        for reason in ("hw_thermal_slowdown", "hw_power_brake_slowdown"):
            if gpu[f"clocks_throttle_reasons.{reason}"] == "Active":
                value = f"{reason} at {gpu['temperature.gpu']} degrees"
                remedy = "look after cooling and power of the node"
                yield NodeFinding(name, where, value, "full clocks", remedy)


def _different_gpus(reports: Reports) -> Iterator[NodeFinding]:
    rows = {name: report["gpus"]["rows"] for name, report in reports.items()}
    kinds = {name: _kinds(gpus) for name, gpus in rows.items()}
    drivers = {name: gpus[0]["driver_version"] for name, gpus in rows.items() if gpus}
    for what, values in (("GPUs", kinds), ("driver of the GPUs", drivers)):
        for name, mine, most in _odd(values):
            right, remedy = f"{most} on the other nodes", "leave it out with --exclude"
            yield NodeFinding(name, what, mine, right, remedy)


def _kinds(gpus: list[dict[str, str]]) -> str:
    counts = Counter(gpu["name"] for gpu in gpus)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or "none"


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> Iterator[NodeFinding]:
    """Yield findings about wrong clocks. ``offsets`` has, for each node, the seconds by which its
    clock is ahead of this machine's, and the error of this measurement."""
    if not offsets:
        return
    middle = statistics.median_low(offset for offset, _ in offsets.values())
    for name, (offset, error) in offsets.items():
        apart = offset - middle
        if abs(apart) > MOST_CLOCKS_APART + error:
            value = f"{abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} the other nodes"
            remedy = "start chrony or systemd-timesyncd there"
            right = f"at most {MOST_CLOCKS_APART:g} s apart"
            yield NodeFinding(name, "clock", value, right, remedy)


def slow_links(links: Links) -> list[Pair]:
    """Return the links whose bandwidth or latency is much worse than usual."""
    if len(links) < 2:
        return []
    rate, trip = usual_link(links)
    return [
        pair
        for pair, link in links.items()
        if link.rate < SLOW * rate or link.trip > max(FAR * trip, trip + _LEAST_TRIP)
    ]


def usual_link(links: Links) -> Link:
    """Return the median bandwidth and latency, or for two nodes the better direction's."""
    rates, trips = zip(*links.values(), strict=True)
    if len(links) > 2:
        return Link(statistics.median(rates), statistics.median(trips))
    return Link(max(rates), min(trips))


def judge_links(links: Links) -> list[NodeFinding]:
    """Return findings about slow links. If all links to or from a node are slow, report the node
    instead of its links in both directions: what it sends slowly delays answers to it too."""
    slow = dict.fromkeys(slow_links(links))
    findings, reported = [], set()
    for place, word in ((0, "sends"), (1, "receives")):
        for name in dict.fromkeys(pair[place] for pair in slow):
            all_of = {pair for pair in links if pair[place] == name}
            if len(all_of) > 1 and all_of <= slow.keys():
                for pair in all_of:
                    del slow[pair]
                reported.add(name)
                mine = usual_link({pair: links[pair] for pair in all_of})
                findings.append(_slow(name, mine, usual_link(links), f"{word} "))
    for pair in slow:
        if reported.isdisjoint(pair):
            findings.append(_slow(" -> ".join(pair), links[pair], usual_link(links)))
    return findings


def judge_lost(
    lost: Mapping[Pair, str], untried: Collection[str] = (), over: str = "tcp"
) -> list[NodeFinding]:
    """Return findings about pairs that cannot connect. A node that fails with several others is
    reported instead of its pairs. ``untried`` are nodes that were not tried with all others."""
    rest, findings = dict(lost), []
    check, right = f"connection ({over})", "it works"
    remedy = "open all ports between the nodes of a run; see routes and /etc/hosts"
    while peers := peers_of(rest):
        name = max(peers, key=lambda one: (one in untried, len(peers[one])))
        if len(peers[name]) < 2:
            break
        mine = {pair: rest.pop(pair) for pair in list(rest) if name in pair}
        word = "to" if all(pair[0] == name for pair in mine) else "with"
        word = "from" if all(pair[1] == name for pair in mine) else word
        others = ", ".join(peers[name][:_NAMED])
        more = f" and {len(peers[name]) - _NAMED} more" if peers[name][_NAMED:] else ""
        value = f"{usual(mine)}, {word} {others}{more}"
        value += "; not tried with the others" if name in untried else ""
        findings.append(NodeFinding(name, check, value, right, remedy))
    pairs = [
        NodeFinding(" -> ".join(pair), check, reason, right, remedy)
        for pair, reason in rest.items()
    ]
    return [*findings, *pairs]


def peers_of(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    """Return, for each node, the other nodes with which it forms a pair."""
    peers: dict[str, dict[str, None]] = {}
    for a, b in pairs:
        peers.setdefault(a, {})[b] = None
        peers.setdefault(b, {})[a] = None
    return {name: list(others) for name, others in peers.items()}


def _slow(where: str, mine: Link, most: Link, word: str = "") -> NodeFinding:
    remedy = "look at its cable, port, duplex and traffic shaping (ethtool, tc -s qdisc)"
    if mine.rate < SLOW * most.rate:
        value, right = f"{word}{mine.rate / 1e6:,.1f} MB/s", f"{most.rate / 1e6:,.0f} MB/s"
        return NodeFinding(where, "bandwidth", value, f"{right} between the others", remedy)
    value, right = f"{mine.trip * 1e6:,.0f} us there and back", f"{most.trip * 1e6:,.0f} us"
    return NodeFinding(where, "latency", value, f"{right} between the others", remedy)
