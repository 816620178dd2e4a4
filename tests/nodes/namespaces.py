"""Nodes on this machine: each has its own network address, name, processes and sshd.

A node is a set of namespaces (network, processes, mounts, name of the host). All are joined by a
bridge; files are those of this machine, so that every folder is a shared one unless it is named in
``private``. Inside a node ``ssh OTHER`` works at once, with keys that exist only there: nothing is
changed in the home folder, in ``/etc/ssh`` or in the network of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "eth0"
_PROGRAMS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
}
# What a node is while it has nothing to do. Its first process ignores SIGCHLD, so that processes
# without a parent vanish when they end.
_FIRST_PROCESS = """
set -e
mount --bind {etc} /etc/ssh
mount --bind {hosts} /etc/hosts
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir /run/sshd
{mounts}
hostname {name}
echo ready
trap '' CHLD
exec sleep infinity
"""
_SSHD = """
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
PidFile /run/sshd.pid
"""
_SSH = """
IdentityFile /etc/ssh/key
LogLevel ERROR
"""


def missing() -> str:
    """Why there can be no nodes here; empty if there can."""
    if os.geteuid() != 0:
        return "nodes of namespaces need root"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"{package} is not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "ip", "link", "add",
         "type", "bridge"], capture_output=True, text=True,
    )  # fmt: skip
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def require(*programs: str) -> None:
    """Skips a test where nodes, or these programs, are not to be had."""
    reason = missing() or next(
        (f"no {name} here" for name in programs if not shutil.which(name)), ""
    )
    if reason:
        pytest.skip(reason)


@dataclass
class Node:
    """One of the machines.

    Attributes:
        name: of the host, such as ``node-1``.
        address: in the network of the nodes.
        first: process id of its first process, as this machine sees it.
    """

    name: str
    address: str
    first: int
    _holder: subprocess.Popen[str] = field(repr=False)

    def command(self, *words: object) -> list[str]:
        """The command line that runs another one on this node, in the same folder."""
        enter = ["nsenter", "-t", str(self.first), "--net", "--pid", "--mount", "--uts"]
        return [*enter, "--wdns=" + os.getcwd(), *map(str, words)]

    def start(self, *words: object, **options: Any) -> subprocess.Popen[str]:
        """Starts a program on this node; :func:`send` reaches it with signals."""
        options = {"text": True, "start_new_session": True, **options}
        return subprocess.Popen(self.command(*words), **options)

    def run(self, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a program on this node to its end; its output is captured."""
        return subprocess.run(
            self.command(*words), **{"capture_output": True, "text": True} | options
        )

    def _must(self, *words: object) -> None:
        self.run(*words).check_returncode()

    def start_sshd(self) -> None:
        self._must("/usr/sbin/sshd", "-E", "/run/sshd.log")

    def stop_sshd(self) -> None:
        """Connections are refused from here on; those that exist are left."""
        self._must("sh", "-c", "kill $(cat /run/sshd.pid)")

    def die(self) -> None:
        """As when the power fails: all processes end, and nothing answers at its address. No other
        node hears of it."""
        self.cut()
        os.kill(self.first, signal.SIGKILL)
        self._holder.wait()

    def cut(self) -> None:
        """Nothing arrives any more, and no connection is refused."""
        self._must("ip", "link", "set", INTERFACE, "down")

    def join(self) -> None:
        self._must("ip", "link", "set", INTERFACE, "up")

    def slow(self, rate: str) -> None:
        """Limits what this node sends, such as to 200kbit."""
        shape = f"tbf rate {rate} burst 4kb latency 500ms"
        self._must(*f"tc qdisc replace dev {INTERFACE} root {shape}".split())

    def quick(self) -> None:
        self._must(*f"tc qdisc del dev {INTERFACE} root".split())


def send(process: subprocess.Popen[str], number: int) -> None:
    """Sends a signal to a program that :meth:`Node.start` has started."""
    for child in _children(process.pid):
        os.kill(child, number)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def nodes(
    count: int,
    folder: Path,
    shells: Sequence[str] = (),
    private: Sequence[Path] = (),
    sshd: bool = True,
) -> Iterator[list[Node]]:
    """Machines ``node-1`` to ``node-N`` until the block ends; then all of their processes end.

    Args:
        folder: for keys and the like, an empty one.
        shells: of root on each node; this machine's if shorter.
        private: existing folders of which every node has its own, empty one.
    """
    subnet = f"10.{78 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    names = [f"node-{number}" for number in range(1, count + 1)]
    addresses = [f"{subnet}.{number}" for number in range(1, count + 1)]
    etc = _keys(folder / "ssh", names, addresses)
    hosts = folder / "hosts"
    pairs = [("127.0.0.1", "localhost"), *zip(addresses, names, strict=True)]
    hosts.write_text("".join(f"{address} {name}\n" for address, name in pairs))
    with contextlib.ExitStack() as opened:
        switch = _held(opened, "echo ready; exec sleep infinity", "--net")
        _enter(switch, "ip link add hub type bridge; ip link set hub up")
        machines = []
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            mounts = [f"mount -t tmpfs tmpfs '{path}'" for path in private]
            if index < len(shells):
                mounts.append(f"mount --bind '{_passwd(folder, shells[index])}' /etc/passwd")
            script = _FIRST_PROCESS.format(
                etc=f"'{etc}'", hosts=f"'{hosts}'", name=name, mounts="\n".join(mounts)
            )
            holder = _held(opened, script, "--net", "--pid", "--mount", "--uts", "--fork",
                           "--kill-child", "--mount-proc")  # fmt: skip
            (first,) = _children(holder.pid)
            machine = Node(name, address, first, holder)
            _enter(switch, f"ip link add end{index} type veth peer name {INTERFACE} netns {first};"
                           f"ip link set end{index} master hub up")  # fmt: skip
            machine._must(
                "sh", "-ec", f"ip link set lo up; ip address add {address}/24 dev {INTERFACE};"
                f"ip link set {INTERFACE} up",
            )  # fmt: skip
            if sshd:
                machine.start_sshd()
            machines.append(machine)
        if sshd:
            _await_ssh(machines)
        yield machines


def _held(opened: contextlib.ExitStack, script: str, *namespaces: str) -> subprocess.Popen[str]:
    """A shell in new namespaces that has printed ``ready``. It ends with this process at latest."""
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    opened.callback(_end, holder)
    assert holder.stdout is not None
    line = holder.stdout.readline()
    if line != "ready\n":
        raise RuntimeError(f"no namespace: {line}{holder.stdout.read()}")
    return holder


def _end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()


def _enter(switch: subprocess.Popen[str], script: str) -> None:
    words = ["nsenter", "-t", str(switch.pid), "--net", "sh", "-ec", script]
    subprocess.run(words, check=True, capture_output=True)


def _keys(folder: Path, names: list[str], addresses: list[str]) -> Path:
    """A replacement of /etc/ssh."""
    folder.mkdir(parents=True, mode=0o755)
    for name in ("host_key", "key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name]
        subprocess.run(list(map(str, words)), check=True, capture_output=True)
    (folder / "authorized_keys").write_bytes((folder / "key.pub").read_bytes())
    host_key = (folder / "host_key.pub").read_text()
    (folder / "ssh_known_hosts").write_text(f"{','.join([*names, *addresses])} {host_key}")
    (folder / "sshd_config").write_text(_SSHD)
    (folder / "ssh_config").write_text(_SSH)
    return folder


def _passwd(folder: Path, shell: str) -> Path:
    """/etc/passwd with another shell for root."""
    lines = Path("/etc/passwd").read_text().splitlines()
    changed = [
        line.rsplit(":", 1)[0] + f":{shell}" if line.startswith("root:") else line for line in lines
    ]
    path = folder / f"passwd-{shell.replace('/', '-')}"
    path.write_text("\n".join([*changed, ""]))
    return path


def _await_ssh(machines: list[Node]) -> None:
    deadline = time.monotonic() + 60
    for machine in machines:
        while (tried := machines[0].run("ssh", machine.name, "true")).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no sshd on {machine.name}: {tried.stderr}")
            time.sleep(0.05)
