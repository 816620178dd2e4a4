"""Which nodes may come back by themselves, from what ssh says."""

import pytest

from megatron.features.resilience.restart.nodes import ask

BOOTING = '"System is booting up. Unprivileged users are not permitted to log in yet."'
CHANGED = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."
SAID = {
    "ssh: connect to host n port 22: Connection refused": (True, "start sshd"),
    "ssh: connect to host n port 22: Connection timed out": (True, "is on"),
    "ssh: connect to host n port 22: No route to host": (True, "is on"),
    "ssh: connect to host n port 22: Network is unreachable": (True, "network"),
    f"{BOOTING}\nConnection closed by 10.0.0.3 port 22": (True, "wait until it has started"),
    "Connection closed by 10.0.0.3 port 22": (True, "journalctl -u ssh"),
    "kex_exchange_identification: read: Connection reset by peer\n"
    "Connection reset by 10.0.0.3 port 22": (True, "journalctl -u ssh"),
    "ssh: Could not resolve hostname n: Temporary failure in name resolution": (True, "DNS"),
    "ssh: Could not resolve hostname n: Name or service not known": (False, "hostfile"),
    "me@n: Permission denied (publickey).": (False, "ssh-copy-id n"),
    "Host key verification failed.": (False, "ssh-keyscan n"),
    CHANGED: (False, "ssh-keygen -R n"),
    "something else": (False, "ssh n true"),
}


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Writes what stands for ssh."""

    def write(script):
        (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


@pytest.mark.parametrize("said", SAID)
def test_who_may_come_back(ssh, said):
    gone, remedy = SAID[said]
    ssh(f"cat >&2 <<'E'\n{said}\nE\nexit 255")
    (refusal,) = ask(["n"], "/", "python", 5)
    assert refusal.gone == gone
    assert remedy in refusal.remedy
    assert refusal.reason in said and (BOOTING not in said or refusal.reason == BOOTING)


@pytest.mark.parametrize(
    ("folder", "python", "reason"),
    [
        ("/", "sh", None),  # as PATH there has it
        ("/", "/bin/sh", None),
        ("/", "no-such-program", "no program no-such-program"),
        ("/", "/nope", "no program /nope"),
        ("/nope", "sh", "no folder /nope"),
    ],
)
def test_what_a_node_has(ssh, folder, python, reason):
    """The question itself, in a shell of this machine."""
    ssh('while [ "$1" != n ]; do shift; done; shift; exec sh -c "$*"')
    assert [refusal.reason for refusal in ask(["n"], folder, python, 5)] == [reason][: bool(reason)]


def test_no_ssh_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="^ssh is not installed here: "):
        ask(["n"], "/", "python", 5)
