"""What a rank of another node does that looks for the file of rank 0."""

import socket
import threading
import time

import pytest

from megatron.config import ConfigError
from megatron.features.launch import folders
from megatron.parallel import meeting

MOUNTS = """\
21 1 0:1 / / rw - overlay overlay rw
22 21 0:2 / /shared rw,relatime shared:1 - nfs4 store:/export rw
23 22 0:3 / /shared/scratch\\040here rw - tmpfs none rw
"""


@pytest.fixture
def mounts(monkeypatch, tmp_path):
    """The mounts of another machine."""
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    monkeypatch.setattr(folders, "MOUNTS", table)


@pytest.mark.parametrize(
    ("folder", "kind", "source"),
    [
        ("/shared/runs/a", "nfs4", "store:/export"),
        ("/shared/scratch here/a", "tmpfs", "none"),
        ("/sharedness", "overlay", "overlay"),
    ],
)
def test_the_file_system_of_a_folder(mounts, folder, kind, source):
    assert folders.file_system(folder) == (kind, source)


def test_a_folder_of_the_node_alone_is_named_at_once(mounts, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LOCAL_PATIENCE", 0.01)
    with pytest.raises(ConfigError) as error:
        folders.look_for(tmp_path / ".probe-1", "--save")
    assert str(error.value) == (
        f"--save {tmp_path}: node {socket.gethostname()} does not see what rank 0 has written "
        "there, and has it on overlay (overlay); name a folder of a file system that all nodes "
        "mount"
    )
    with pytest.raises(ConfigError, match="and has no such folder; name"):
        folders.look_for(tmp_path / "missing" / ".probe-1", "--save")


def test_a_file_system_of_the_network_may_take_its_time(mounts, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LOCAL_PATIENCE", 0.0)
    monkeypatch.setattr(folders, "file_system", lambda folder: ("nfs4", "store:/export"))
    probe = tmp_path / ".probe-1"
    threading.Timer(0.3, probe.touch).start()
    began = time.monotonic()
    folders.look_for(probe, "--save")
    assert time.monotonic() - began > 0.25


@pytest.mark.parametrize(
    ("here", "several"), [("2", True), ("4", False), (None, True), ("many", True)]
)
def test_ranks_are_named_with_their_node_where_there_are_several(monkeypatch, here, several):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_SIZE", here)
    assert meeting.on_several_nodes() == several
    assert meeting.own_name() == (f"rank 3 ({socket.gethostname()})" if several else "rank 3")
