"""Two nodes on this machine: namespaces of the network, with a link that can be cut or slowed."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.fault import Place

_NUMBERS = itertools.count(os.getpid() % 200)
INTERFACE = "node0"


def possible() -> bool:
    """Whether this process may make namespaces."""
    return os.geteuid() == 0 and os.path.exists("/sbin/ip")


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


@dataclass
class Network:
    """Two namespaces; the first half of the ranks is in one, the other half in the other."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def node_of(self, rank: int, size: int) -> int:
        return int(rank >= size / 2)

    def variables(self, rank: int, size: int) -> Mapping[str, object]:
        """Of the environment of a rank: its node's local ranks, the first node's address."""
        half = max(1, size // 2)
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.addresses[0],
            "LOCAL_RANK": rank % half,
            "LOCAL_WORLD_SIZE": half,
        }

    def cut(self) -> None:
        """Nothing arrives any more, and no connection is refused."""
        _ip("-n", self.names[1], "link", "set", INTERFACE, "down")

    def join(self) -> None:
        _ip("-n", self.names[1], "link", "set", INTERFACE, "up")

    def slow(self, rate: str) -> None:
        """Limits what both nodes send, such as to 200kbit."""
        for name in self.names:
            words = ["tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf"]
            subprocess.run(
                [*words, "rate", rate, "burst", "4kb", "latency", "500ms"],
                check=True, capture_output=True,
            )  # fmt: skip

    def quick(self) -> None:
        for name in self.names:
            subprocess.run(
                ["tc", "-n", name, "qdisc", "del", "dev", INTERFACE, "root"],
                check=False, capture_output=True,
            )  # fmt: skip


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Until the block ends."""
    number = next(_NUMBERS)
    names = (f"faults{os.getpid()}-{number}a", f"faults{os.getpid()}-{number}b")
    net = Network(names, (f"10.77.{number % 250}.1", f"10.77.{number % 250}.2"))
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", names[0], "link", "add", INTERFACE, "type", "veth",
            "peer", "name", INTERFACE, "netns", names[1])  # fmt: skip
        for name, address in zip(names, net.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
        yield net
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def two_nodes(size: int) -> Any:
    """A :class:`Place` for a fault: the ranks of a training of this size on two nodes."""

    @contextlib.contextmanager
    def place(folder: Path) -> Iterator[Place]:
        with network() as net:
            yield Place(
                of=lambda rank: {"namespace": net.names[net.node_of(rank, size)]},
                variables=lambda rank: net.variables(rank, size),
                tools=net,
            )

    return place
