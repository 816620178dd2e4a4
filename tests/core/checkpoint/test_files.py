"""Files of checkpoints: replaced or kept, and safetensors as the package itself reads them."""

import hashlib
import io
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron.checkpoint import files
from megatron.checkpoint.files import (
    CheckpointError,
    read_json,
    write_bytes,
    write_json,
    write_tensors,
    write_text,
)
from megatron.util.digests import sha256_of_file


def test_text_is_replaced_or_kept(tmp_path, monkeypatch):
    path = tmp_path / "tracker"
    write_text(path, "old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_facts_against_sha256sum(tmp_path):
    facts = write_bytes(tmp_path / "a", b"abc")
    # FIPS 180-2, appendix B.1.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert facts == {"bytes": 3, "sha256": digest}
    assert sha256_of_file(tmp_path / "a") == digest
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "a", b"another")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a": 1,}', b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"\x80\x05K\x01."],
)
def test_what_is_no_json_is_refused_by_name(tmp_path, content):
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="state.json is not valid JSON"):
        read_json(tmp_path / "state.json")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="state.json is missing"):
        read_json(tmp_path / "state.json")
    (tmp_path / "state.json").mkdir()
    with pytest.raises(CheckpointError, match="state.json cannot be read"):
        read_json(tmp_path / "state.json")
    write_json(tmp_path / "a.json", {"a": [1, 2.5, None]})
    assert read_json(tmp_path / "a.json") == {"a": [1, 2.5, None]}


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.randn(7, 11, generator=generator),
        "view": torch.randn(12, 5, generator=generator).t()[1:3],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "é": torch.randn(3, generator=generator, requires_grad=True),
        "state": torch.get_rng_state(),
    }


@pytest.mark.parametrize("block", [16, 2**24])
def test_tensors_against_the_safetensors_package(tmp_path, tensors, monkeypatch, block):
    monkeypatch.setattr(files, "_BLOCK_BYTES", block)
    path = tmp_path / "a.safetensors"
    facts = write_tensors(path, tensors)
    content = path.read_bytes()
    assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    stored = load_file(path)
    assert stored.keys() == tensors.keys()
    for name, values in tensors.items():
        assert stored[name].dtype == values.dtype
        assert torch.equal(stored[name], values.detach())
    with safe_open(path, framework="np") as file:
        assert np.array_equal(file.get_slice("matrix")[2:4], tensors["matrix"][2:4].numpy())


def test_a_short_write_is_continued_and_a_failed_one_raised(tmp_path, tensors, monkeypatch):
    """A raw write may take less than it was given, as it does before a disk is full."""

    class Grudging(io.FileIO):
        def __init__(self, path, mode, buffering):
            super().__init__(path, mode)
            self.room = room

        def write(self, block):
            if not self.room:
                raise OSError(28, "No space left on device")
            count = super().write(block[: min(5, self.room)])
            self.room -= count
            return count

    monkeypatch.setattr(files, "open", Grudging, raising=False)
    room = 10**9
    facts = write_tensors(tmp_path / "a", tensors)
    assert sha256_of_file(tmp_path / "a") == facts["sha256"]
    assert torch.equal(load_file(tmp_path / "a")["matrix"], tensors["matrix"])
    room = 200
    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "b", tensors)
    assert os.path.getsize(tmp_path / "b") == 200
