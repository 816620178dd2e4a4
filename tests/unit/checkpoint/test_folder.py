"""Which checkpoint is found: a complete one, the one that the tracker names, or an error."""

import pytest

from megatron.checkpoint.files import CheckpointError, write_text
from megatron.checkpoint.folder import (
    complete_tags,
    file_facts,
    find,
    incomplete_folder,
    publish,
    remove_incomplete,
)


def make(save, iteration, content="weights"):
    folder = incomplete_folder(save, iteration)
    folder.mkdir(parents=True)
    (folder / "a.bin").write_text(content)
    return publish(save, iteration, {"a.bin": file_facts(folder / "a.bin")})


def test_tracker_names_the_newest(tmp_path):
    for iteration in (5, 10, 100):
        make(tmp_path, iteration)
    assert (tmp_path / "latest").read_text() == "global_step100\n"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100\n"
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


def test_nothing_is_not_an_error_but_a_broken_tracker_is(tmp_path):
    assert find(str(tmp_path / "absent")) is None
    assert find(str(tmp_path)) is None
    make(tmp_path, 5)
    (tmp_path / "latest").write_text("")
    assert find(str(tmp_path)) == tmp_path / "global_step5"
    (tmp_path / "latest").write_text("global_step99")
    with pytest.raises(CheckpointError, match="global_step99.*it has global_step5"):
        find(str(tmp_path))
    with pytest.raises(CheckpointError, match="no complete checkpoint global_step7"):
        find(str(tmp_path), "7")


def test_what_killed_saves_left_is_removed(tmp_path):
    make(tmp_path, 5)
    for iteration in (5, 7):
        incomplete_folder(tmp_path, iteration).mkdir()
        (incomplete_folder(tmp_path, iteration) / "a.bin").write_text("half")
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
