"""megatron/apps/doctor: probes on this machine, some of which find an unusual one."""

import contextlib
import os
import socket
import sys

import pytest

from megatron.apps.doctor import probe
from megatron.apps.doctor.examination import _shared
from megatron.apps.doctor.session import Session, here

WITHOUT_LOCKS = """
def _refuse(*_):
    raise OSError(38, "Function not implemented")
fcntl.flock = _refuse
"""
FROM_C = """
def clock():
    os.write(1, b"NCCL version 2.26.2+cuda12.8\\n")
    subprocess.run(["echo", "from a child"])
    return 1.0
REQUESTS["clock"] = clock
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts probes that have further source text each; they end with the test."""
    with contextlib.ExitStack() as opened:

        def started(*sources):
            sessions = []
            with open(probe.__file__) as file:
                original = file.read()
            for number, source in enumerate(sources, start=1):
                path = tmp_path / f"probe{number}.py"
                path.write_text(original + source)
                session = Session(f"n{number}", here(sys.executable))
                opened.callback(session.end)
                with monkeypatch.context() as patched:
                    patched.setattr(probe, "__file__", str(path))
                    session.ready(20)
                sessions.append(session)
            return sessions

        yield started


def shared(sessions, folder):
    """What is found of a folder that these see."""
    found = _shared(sessions, "save", {session.name: str(folder) for session in sessions})
    return [(one.node, one.value, one.remedy) for one in found]


@pytest.fixture
def save(tmp_path):
    (tmp_path / "save").mkdir()
    return tmp_path / "save"


def test_a_folder_with_locks(start, save):
    assert shared(start("", ""), save) == []
    assert os.listdir(save) == []


@pytest.mark.parametrize("who", [0, 1])
def test_a_folder_without_locks(start, save, who):
    """Lustre has none without -o flock. Nothing is left there, and it is looked at all the same."""
    sources = ["", ""]
    sources[who] = WITHOUT_LOCKS
    ((node, value, remedy),) = shared(start(*sources), save)
    assert (node, value) == (f"n{who + 1}", "without locks: Function not implemented")
    assert "-o flock" in remedy
    assert os.listdir(save) == []


def test_a_folder_without_locks_that_is_not_shared(start, save):
    blind = "\ndef look(**_):\n    return 'not seen'\nREQUESTS['look'] = look\n"
    found = shared(start(WITHOUT_LOCKS, WITHOUT_LOCKS + blind), save)
    assert [(node, value) for node, value, _ in found] == [
        ("n1", "without locks: Function not implemented"),
        ("n2", "does not see what n1 writes there"),
    ]


def test_a_folder_that_cannot_be_written_has_nothing_left(tmp_path):
    (tmp_path / "name").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        probe.mark(str(tmp_path), "name")
    assert os.listdir(tmp_path) == [] and not probe._held


def test_what_is_printed_past_python_is_left_out_of_answers(start):
    (session,) = start(FROM_C)
    assert session.ask("clock", 20) == 1.0


def test_listeners_have_both_kinds_of_address():
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    port = probe.listen(0)
    try:
        for host in ("127.0.0.1", "::1"):
            probe.connect(host, port, 5)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    finally:
        probe.close()


def test_a_port_that_another_program_has(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(OSError, match="in use$"):
            probe.listen(other.getsockname()[1])
        assert "server" not in probe._held


def test_a_listener_without_ipv6(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    port = probe.listen(0)
    try:
        probe.connect("127.0.0.1", port, 5)
    finally:
        probe.close()
