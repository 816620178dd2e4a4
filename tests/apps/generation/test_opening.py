"""Checkpoints that cannot be opened for generation."""

import os

import pytest

from megatron.apps.generation import opening
from megatron.apps.generation.memory import CacheConfig
from megatron.config import ConfigError, Setting


def test_a_file_that_this_user_may_not_read(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights" / "model.safetensors"
    file.write_text("")
    # Tests may run as a user who may read everything.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != file and access(path, mode))

    def fails(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(opening, "opened_checkpoint", fails)
    settings = {"load": Setting(str(tmp_path), "flag --load")}
    with (
        pytest.raises(ConfigError, match=f"--load {tmp_path}: this user may not read {file}"),
        opening.opened_runner(settings, 1, CacheConfig()),
    ):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(opening, "opened_checkpoint", fails)
    with (
        pytest.raises(PermissionError),
        opening.opened_runner(settings, 1, CacheConfig()),
    ):
        pass
