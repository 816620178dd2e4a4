"""Which checkpoint is found: a complete one, the one that the tracker names, or an error."""

import os
import shutil

import pytest

from megatron.checkpoint.files import CheckpointError, write_text
from megatron.checkpoint.folder import (
    complete_tags,
    discard,
    find,
    incomplete_folder,
    publish,
    remove_incomplete,
)
from megatron.checkpoint.manifest import check_file, file_facts, manifest

NEEDED = ("config.json", "index.json", "state.json")


def make(save, iteration, content="weights"):
    folder = incomplete_folder(save, iteration)
    folder.mkdir(parents=True)
    for name in (*NEEDED, "a.bin"):
        (folder / name).write_text(content)
    return publish(save, iteration, {path.name: file_facts(path) for path in folder.iterdir()})


def content_of(folder):
    """What a checkpoint holds, after a look at its manifest."""
    for name, facts in manifest(folder).items():
        check_file(folder / name, facts)
    return (folder / "a.bin").read_text()


def test_tracker_names_the_newest(tmp_path):
    for iteration in (5, 10, 100):
        make(tmp_path, iteration)
    assert (tmp_path / "latest").read_text() == "global_step100"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert complete_tags(tmp_path) == ["global_step5", "global_step10", "global_step100"]
    assert find(str(tmp_path)) == tmp_path / "global_step100"
    assert find(str(tmp_path), "10") == tmp_path / "global_step10"
    assert find(str(tmp_path), "global_step5") == tmp_path / "global_step5"
    assert find(str(tmp_path / "global_step5")) == tmp_path / "global_step5"


def test_the_tracker_is_obeyed(tmp_path):
    make(tmp_path, 5)
    make(tmp_path, 10)
    write_text(tmp_path / "latest", "global_step5\n")
    assert find(str(tmp_path)) == tmp_path / "global_step5"


def test_nothing_is_not_an_error(tmp_path):
    assert find(str(tmp_path / "absent")) is None
    assert find(str(tmp_path)) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"global_step99\n",
        b"global_step5\x0b",
        b"\xff5\n",
        b".",
        b"..",
        b"a/..",
        b"/tmp",
    ],
)
def test_a_broken_tracker_is_refused_by_name(tmp_path, text):
    make(tmp_path, 5)
    (tmp_path / "a").mkdir()
    (tmp_path / "latest").write_bytes(text)
    with pytest.raises(CheckpointError, match="latest names .* it has global_step5: .*delete it"):
        find(str(tmp_path))
    with pytest.raises(CheckpointError, match="no complete checkpoint global_step7"):
        find(str(tmp_path), "7")
    (tmp_path / "latest").unlink()
    assert find(str(tmp_path)) == tmp_path / "global_step5"


def test_a_tracker_of_another_format_is_left_to_that(tmp_path):
    make(tmp_path, 5)
    (tmp_path / "global_step9").mkdir()
    (tmp_path / "latest").write_text("global_step9")
    assert find(str(tmp_path)) is None
    (tmp_path / "global_step9" / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="global_step9.*not a complete checkpoint"):
        find(str(tmp_path))


def test_what_killed_saves_left_is_removed(tmp_path):
    make(tmp_path, 5)
    for iteration in (5, 7):
        incomplete_folder(tmp_path, iteration).mkdir()
        (incomplete_folder(tmp_path, iteration) / "a.bin").write_text("half")
    (tmp_path / ".global_step3.deleted").mkdir()
    (tmp_path / ".global_step5.replaced").mkdir()
    (tmp_path / ".latest.17.tmp").write_text("")
    remove_incomplete(tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert find(str(tmp_path)) == tmp_path / "global_step5"


def test_a_folder_of_megatron_is_no_fresh_start(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    (tmp_path / "iter_0000100").mkdir()
    with pytest.raises(CheckpointError, match="none in this project's format"):
        find(str(tmp_path))


def test_a_wanted_checkpoint_of_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint global_step7; it has none"):
        find(str(tmp_path / "absent"), "7")


def test_half_written_is_never_picked(tmp_path):
    make(tmp_path, 5)
    (tmp_path / "latest").unlink()
    half = incomplete_folder(tmp_path, 10)
    half.mkdir()
    (half / "a.bin").write_text("half")
    without_manifest = tmp_path / "global_step20"
    without_manifest.mkdir()
    assert find(str(tmp_path)) == tmp_path / "global_step5"


def test_saving_the_same_iteration_again_replaces_it(tmp_path):
    make(tmp_path, 5, "old")
    make(tmp_path, 5, "new")
    assert (tmp_path / "global_step5" / "a.bin").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step5",
        "latest",
        "latest_checkpointed_iteration.txt",
    ]


class Killed(BaseException):
    """Stands for kill -9: nothing of the process's own runs after it."""


def kill_before_call(monkeypatch, number):
    """Has the process die before its ``number``-th change of the file system."""
    calls = iter(range(10**9))

    def deadly(real):
        def function(*args, **kwargs):
            if next(calls) >= number:
                raise Killed
            return real(*args, **kwargs)

        return function

    for name in ("rename", "replace", "fsync"):
        monkeypatch.setattr(os, name, deadly(getattr(os, name)))
    monkeypatch.setattr(shutil, "rmtree", deadly(shutil.rmtree))


@pytest.mark.parametrize("iteration", [5, 10])
def test_killed_at_every_moment(tmp_path, monkeypatch, iteration):
    """Another checkpoint of the same step, or the next: the tracker's is there at all times, the
    new one once the save has come back; and the next save clears what is left."""
    for moment in range(100):
        save = tmp_path / str(moment)
        make(save, 5, "old")
        with monkeypatch.context() as patch:
            kill_before_call(patch, moment)
            try:
                make(save, iteration, "new")
                survived = True
            except Killed:
                survived = False
        found = find(str(save))
        assert found is not None
        assert content_of(found) in (("new",) if survived else ("old", "new"))
        named = (save / "latest").read_text().strip()
        assert named in complete_tags(save)
        content = content_of(found)
        assert content_of(find(str(save), named)) == content
        remove_incomplete(save)
        assert content_of(find(str(save))) == content
        make(save, iteration, "newer")
        assert content_of(find(str(save))) == "newer"
        remove_incomplete(save)
        assert not list(save.glob(".*"))
        if survived:
            break
    assert survived and moment > 8


@pytest.mark.parametrize("iteration", [5, 10])
@pytest.mark.parametrize("call", ["rename", "replace", "fsync"])
def test_an_error_at_every_moment(tmp_path, monkeypatch, iteration, call):
    """The same with a full or failing disk, after which the process continues."""
    for moment in range(100):
        save = tmp_path / str(moment)
        make(save, 5, "old")
        calls = iter(range(10**9))
        real = getattr(os, call)

        def failing(*args, at=moment, calls=calls, real=real, **kwargs):
            if next(calls) == at:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        failed = False
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                make(save, iteration, "new")
            except OSError:
                failed = True
        found = content_of(find(str(save)))
        assert found in ("old", "new")
        assert failed or found == "new"
        assert (save / "global_step5").is_dir()
        make_again(save, iteration)
        assert content_of(find(str(save))) == "newer"
        remove_incomplete(save)
        assert not list(save.glob(".*"))
        if next(calls) <= moment:
            break
    assert moment >= 1


def make_again(save, iteration):
    remove_incomplete(save)
    make(save, iteration, "newer")


def test_half_deleted_is_never_seen(tmp_path, monkeypatch):
    folder = make(tmp_path, 5)
    make(tmp_path, 10)
    with monkeypatch.context() as patch:
        kill_before_call(patch, 2)  # removing an older leftover, renaming, and no further
        with pytest.raises(Killed):
            discard(folder)
    assert complete_tags(tmp_path) == ["global_step10"]
    assert [path.name for path in tmp_path.glob(".*")] == [".global_step5.deleted"]
