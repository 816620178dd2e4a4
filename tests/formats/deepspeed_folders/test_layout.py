"""DeepSpeed's folders appear whole and are found, whenever a save is killed or fails."""

import os
import shutil

import pytest

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import TRACKER, remove_incomplete, replace_folder
from megatron.formats.conversion.output import unfinished_folder
from megatron.formats.deepspeed_folders.folder import (
    UNIVERSAL_SUFFIX,
    UNIVERSAL_TRACKER,
    is_engine_folder,
    is_universal,
    locate,
)

ENGINE = ("global_step5", TRACKER, is_engine_folder, "")
UNIVERSAL = (f"global_step5{UNIVERSAL_SUFFIX}", UNIVERSAL_TRACKER, is_universal, UNIVERSAL_SUFFIX)
FORMATS = pytest.mark.parametrize("form", [ENGINE, UNIVERSAL], ids=["engine", "universal"])


class Killed(BaseException):
    """Stands for kill -9: nothing of the process's own runs after it."""


def make(save, form, content):
    """Writes a checkpoint as both writers do."""
    final = save / form[0]
    with unfinished_folder(final) as written:
        if form is UNIVERSAL:
            (written / "zero").mkdir()
        (written / "mp_rank_00_model_states.pt").write_text(content)
        replace_folder(written, final, {form[1]: final.name})


def found(save, form, wanted=None):
    """Return the content of the checkpoint in a folder; it must be complete."""
    folder = locate(save, wanted, *form[1:])
    assert folder is not None
    return (folder / "mp_rank_00_model_states.pt").read_text()


def failing(patch, number, error, names):
    """Has the ``number``-th change of the file system fail: by an ``OSError`` once, else for good.

    Returns:
        The counter of changes.
    """
    calls = []

    def wrap(real):
        def function(*args, **kwargs):
            calls.append(real)
            at = len(calls) - 1
            if at == number or (at > number and error is Killed):
                raise error
            return real(*args, **kwargs)

        return function

    for module, name in names:
        patch.setattr(module, name, wrap(getattr(module, name)))
    return calls


@FORMATS
@pytest.mark.parametrize(
    "second",
    [False, pytest.param(True, marks=pytest.mark.proof)],
    ids=["one kill", "two kills"],
)
def test_killed_at_every_moment(tmp_path, monkeypatch, form, second):
    names = [(os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")]
    survived = False
    for moment in range(40):
        # The second save may have more to do: it finds what the first has left.
        for again in range(moment + 5 if second else 1):
            save = tmp_path / f"{moment}-{again}"
            save.mkdir()
            make(save, form, "old")
            survived = True
            for number in (moment, again) if second else (moment,):
                with monkeypatch.context() as patch:
                    failing(patch, number, Killed, names)
                    try:
                        make(save, form, "new")
                    except Killed:
                        survived = False
            content = found(save, form)
            assert content in (("new",) if survived else ("old", "new"))
            assert found(save, form, "5") == found(save, form, form[0]) == content
            assert found(save / form[0], form) == content  # named itself
            remove_incomplete(save)
            assert found(save, form) == content
            make(save, form, "newer")
            assert found(save, form) == "newer"
            remove_incomplete(save)
            assert sorted(path.name for path in save.iterdir()) == sorted(form[:2])
        if survived:
            break
    assert survived and moment > 6


@FORMATS
@pytest.mark.parametrize("call", ["rename", "replace", "fsync"])
def test_an_error_at_every_moment(tmp_path, monkeypatch, form, call):
    """The process continues: the old file has its name again, and nothing hidden is needed."""
    for moment in range(40):
        save = tmp_path / str(moment)
        save.mkdir()
        make(save, form, "old")
        error, failed = OSError(28, "No space left on device"), False
        with monkeypatch.context() as patch:
            calls = failing(patch, moment, error, [(os, call)])
            try:
                make(save, form, "new")
            except OSError:
                failed = True
        assert (save / form[0]).is_dir()
        assert found(save, form) in (("old", "new") if failed else ("new",))
        make(save, form, "newer")
        assert found(save, form) == "newer"
        remove_incomplete(save)
        assert sorted(path.name for path in save.iterdir()) == sorted(form[:2])
        if len(calls) <= moment:
            break
    assert 1 <= moment < 39


@FORMATS
def test_an_old_one_is_found_only_where_no_other_stands(tmp_path, form):
    """A save killed before it has deleted the old one leaves both."""
    make(tmp_path, form, "old")
    (tmp_path / form[0]).rename(tmp_path / f".{form[0]}.replaced")
    (tmp_path / form[0]).mkdir()  # another program's, killed before its first file
    assert found(tmp_path, form) == "old"
    remove_incomplete(tmp_path)
    assert found(tmp_path, form) == "old"
    (tmp_path / form[0] / "weights.bin").write_text("of another format")
    with pytest.raises(CheckpointError, match="which is not in") as caught:
        make_other_and_locate(tmp_path, form)
    assert "global_step3" in str(caught.value)


def make_other_and_locate(save, form):
    other = (form[0].replace("5", "3"), *form[1:])
    written = save / other[0]
    (written / "zero" if form is UNIVERSAL else written).mkdir(parents=True)
    (written / "mp_rank_00_model_states.pt").write_text("other")
    return locate(save, None, *form[1:])
