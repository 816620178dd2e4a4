"""Tensors in files: the same numbers at the same views, and named errors of folders and disks.

The reference is the tensor that was moved."""

import errno
import mmap
import os
import types
from pathlib import Path

import pytest
import torch

from megatron.config import ConfigError
from megatron.features.tiers import places
from megatron.features.tiers.places import MappedFiles

KEY = "zero_optimization.offload_param.nvme_path"


def in_files(tensor, folder):
    """True if the memory of a tensor is that of a file of a folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < end:
            return str(folder) in line
    raise AssertionError("the tensor has no memory")


def test_views_move_together(tmp_path):
    whole = torch.randn(2, 3, 7, dtype=torch.float64)
    views = [whole, whole[1], whole.permute(2, 0, 1)[1:3], whole.view(-1)[5:20:3]]
    other, empty = torch.arange(5, dtype=torch.bfloat16), torch.empty(0)
    before = [view.clone() for view in views], other.clone(), whole.data_ptr()
    weight = torch.nn.Parameter(torch.randn(4, 4))
    weight.grad = torch.randn(4, 4)
    same = weight.detach().clone(), weight.grad.clone()
    files = MappedFiles(str(tmp_path), KEY)
    files.move([*views, other, empty, weight, weight.grad])
    assert all(map(torch.equal, views, before[0])) and torch.equal(other, before[1])
    assert torch.equal(weight, same[0]) and torch.equal(weight.grad, same[1])
    assert weight.requires_grad and weight.is_leaf
    assert all(in_files(x, tmp_path) for x in [*views, other, weight, weight.grad])
    whole.fill_(3)
    assert all(bool((view == 3).all()) for view in views)
    assert files.bytes == 2 * 3 * 7 * 8 + 5 * 2 + 2 * 4 * 4 * 4 and files.speed > 0
    assert not list(tmp_path.iterdir())


def test_new_tensors_are_zeros(tmp_path):
    like = torch.empty(3, 5, dtype=torch.bfloat16)
    zeros = MappedFiles(str(tmp_path), KEY).zeros_like(like)
    assert (zeros.shape, zeros.dtype) == (like.shape, like.dtype)
    assert not zeros.any() and in_files(zeros, tmp_path)


def test_memory_is_given_back(tmp_path):
    tensor = MappedFiles(str(tmp_path), KEY).empty(mmap.PAGESIZE * 4)
    assert in_files(tensor, tmp_path)
    del tensor
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_folder_must_exist_and_be_writable(tmp_path, monkeypatch):
    for path in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=f"{KEY} {path}: folder not found"):
            MappedFiles(str(path), KEY)

    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=f"{KEY} {tmp_path}: no file .* Read-only file system"):
        MappedFiles(str(tmp_path), KEY)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_without_room_is_said_before_anything_changes(tmp_path, monkeypatch, number):
    files, tensor = MappedFiles(str(tmp_path), KEY), torch.randn(8)
    kept, place = tensor.clone(), tensor.data_ptr()
    files.empty(2**20)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError) as caught:
        files.move([tensor])
    told = str(caught.value)
    assert told.startswith(f"{KEY} {tmp_path}: ")
    if number == errno.EIO:
        assert "cannot be reserved: Input/output error" in told
    else:
        assert "no room for" in told and "GiB are free" in told
    assert torch.equal(tensor, kept) and tensor.data_ptr() == place


def test_room_is_reserved_on_the_disk(tmp_path):
    """A file with holes would end the process in a step on a full disk."""
    stats = []

    def watched(number, offset, size):
        reserve(number, offset, size)
        stats.append(os.fstat(number).st_blocks * 512)

    reserve = os.posix_fallocate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", watched)
        MappedFiles(str(tmp_path), KEY).empty(2**20)
    assert stats == [2**20]


@pytest.mark.parametrize(
    "groups, share, first", [(2, 0.3, 1), (5, 0.3, 3), (10, 0.5, 5), (3, 0.0, 3), (4, 1, 0)]
)
def test_the_first_sub_groups_move_to_the_device(groups, share, first, monkeypatch, capsys):
    """DeepSpeed chooses them (``_create_fp32_partitions``): int((1 - ratio) N)."""
    # A parameter of the CPU cannot be set to meta, as it can to CUDA.
    mains = [
        types.SimpleNamespace(data=torch.ones(4), grad=torch.ones(4), numel=lambda: 4)
        for _ in range(groups)
    ]
    monkeypatch.setattr(places, "holders", lambda engine: mains)
    places.move_to_device(types.SimpleNamespace(device=torch.device("meta")), share)
    devices = [main.data.device.type for main in mains]
    assert devices == ["meta"] * first + ["cpu"] * (groups - first)
    assert [main.grad.device.type for main in mains] == devices
    assert f"{first} of {groups} sub-groups, {4 * first} of {4 * groups}" in capsys.readouterr().out
