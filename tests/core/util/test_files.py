"""Files are there whole or as they were, and nothing else stays."""

import errno
import os

import pytest

from megatron.util.files import naming, replacing, write_whole


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, old):
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == (old and {"file": old} or {})


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    with replacing(path, ".gz") as part:
        part.write_bytes(b"new")
        assert part.parent == tmp_path and part.name.endswith(".gz")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("sync") or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda *names: done.append("replace") or replace(*names))
    write_whole(tmp_path / "file", b"content")
    assert done == ["sync", "replace"]


def test_others_may_read_it_as_any_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_whole(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_full_disk_is_named(tmp_path):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device: .*/file'"), naming("a/file"):
        full()
    path = tmp_path / "x.json"
    with pytest.raises(OSError, match="No space left on device: .*x.json'"), replacing(path):
        full()
    with pytest.raises(ConnectionResetError) as raised, naming("a/file"):
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    assert raised.value.filename is None
    with pytest.raises(FileNotFoundError, match="other"), naming("a/file"):
        open("other")  # noqa: SIM115
