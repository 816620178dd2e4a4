"""Checks over ssh whether nodes can take part in a run, and signals that end their processes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

_NO_FOLDER, _NO_PYTHON, _NO_EXPORT = 41, 42, 43  # exit codes of the command that checks a node


@dataclass(frozen=True)
class _Saying:
    """Phrase in ssh's error output, in lower case, and the remedy. ``gone`` is True if the node may
    become reachable again without intervention."""

    words: str
    remedy: str
    gone: bool = False


_SAYINGS = (
    _Saying("connection refused", "start sshd there (systemctl start ssh), or give its --ssh-port",
            gone=True),
    _Saying("timed out", "see whether the machine is on, and the network and firewall between",
            gone=True),
    _Saying("no route", "see whether the machine is on, and the network between", gone=True),
    _Saying("network is unreachable", "see the network and routes of this machine", gone=True),
    _Saying("system is booting up", "wait until it has started", gone=True),
    _Saying("temporary failure in name resolution", "see whether DNS answers, or add the name to "
            "/etc/hosts", gone=True),
    _Saying("could not resolve",
            "correct the name in the hostfile, or add it to /etc/hosts or DNS"),
    _Saying("permission denied", "allow ssh without a password: ssh-copy-id {name}"),
    _Saying("remote host identification", "the machine is another one now: ssh-keygen -R {name}"),
    _Saying("host key", "add its key: ssh-keyscan {name} >> ~/.ssh/known_hosts"),
    _Saying("connection closed by", "see what its sshd says (journalctl -u ssh)", gone=True),
    _Saying("connection reset by", "see what its sshd says (journalctl -u ssh)", gone=True),
)  # fmt: skip
"""Known ssh errors. The first one that matches applies."""


@dataclass(frozen=True)
class Refusal:
    """Reason why a node cannot take part, and the remedy. ``gone`` is True if the node may come
    back without intervention."""

    name: str
    reason: str
    remedy: str
    gone: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}; {self.remedy}"


def ask(
    names: Sequence[str], folder: str, python: str, seconds: int, options: Sequence[str] = ()
) -> list[Refusal]:
    """Check all nodes concurrently. Return a refusal for each node that cannot take part,
    ordered like ``names``. ``options`` are additional ssh arguments. Raises FileNotFoundError
    without ssh."""
    if shutil.which("ssh") is None:
        raise FileNotFoundError(
            "ssh is not installed here: install OpenSSH's client, by which the nodes are reached"
        )
    asked = _on_all(names, _question(folder, python), seconds, options)
    deadline = time.monotonic() + 2 * seconds
    refusals = []
    for name, process in zip(names, asked, strict=True):
        try:
            _, said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            said = f"ssh timed out after {2 * seconds} s"
        if process.returncode:
            refusals.append(_refusal(name, process.returncode, said, folder, python))
    return refusals


def stop(names: Sequence[str], launcher: str, seconds: int, options: Sequence[str] = ()) -> None:
    """Send SIGTERM to the processes of a run on all nodes, without waiting. ``launcher`` is a
    regular expression that matches the command line of their parent process."""
    script = f'for parent in $(pgrep -f "{launcher}"); do pkill -P $parent; done'
    _on_all(names, f"sh -c {shlex.quote(script)}", seconds, options)


def _on_all(
    names: Sequence[str], command: str, seconds: int, options: Sequence[str]
) -> list[subprocess.Popen[str]]:
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}", *options]
    return [
        subprocess.Popen(
            [*ssh, name, command],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip


def _question(folder: str, python: str) -> str:
    """Return the shell command that checks a node. It uses ``export``, as DeepSpeed's pdsh launcher
    does, to find out whether the user's login shell supports it."""
    script = (
        f"cd {shlex.quote(folder)} || exit {_NO_FOLDER}; "
        f"command -v {shlex.quote(python)} || exit {_NO_PYTHON}; "
        f'test "$MEGATRON_NODE" || exit {_NO_EXPORT}'
    )
    return f"export MEGATRON_NODE=1; sh -c {shlex.quote(script)}"


def _refusal(name: str, status: int, said: str, folder: str, python: str) -> Refusal:
    if status == _NO_FOLDER:
        remedy = "mount or copy it: processes start in the same folder on every node"
        return Refusal(name, f"no folder {folder}", remedy)
    if status == _NO_PYTHON:
        remedy = "install the same environment at the same path on every node"
        return Refusal(name, f"no program {python}", remedy)
    if status == _NO_EXPORT:
        remedy = "chsh -s /bin/bash there: DeepSpeed's launcher sends `export`"
        return Refusal(name, "the login shell does not know `export`", remedy)
    lines = [text for line in said.splitlines() if (text := line.strip("@ \t"))]
    for saying in _SAYINGS:
        for line in lines:
            if saying.words in line.lower():
                return Refusal(name, line, saying.remedy.format(name=name), saying.gone)
    reason = lines[-1] if lines else f"ssh ended with status {status}"
    return Refusal(name, reason, f"see what `ssh {name} true` prints")


def keep_alive(variables: MutableMapping[str, str]) -> None:
    """Make pdsh detect a lost node within 16 seconds, unless the user's ssh options set a limit."""
    given = variables.get("PDSH_SSH_ARGS_APPEND", "")
    if "ServerAlive" not in given:
        ours = "-o ServerAliveInterval=4 -o ServerAliveCountMax=3 -o ConnectTimeout=10"
        variables["PDSH_SSH_ARGS_APPEND"] = f"{given} {ours}".strip()
