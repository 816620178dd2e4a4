"""What --keep-last and --keep-every delete, and what they never do."""

import os

import pytest

from megatron.features.older_checkpoints.retention import apply_retention, superseded


def steps(save):
    return sorted(int(path.name.removeprefix("global_step")) for path in save.glob("global_step*"))


def make(save, *iterations):
    for iteration in iterations:
        (save / f"global_step{iteration}").mkdir(parents=True)
        (save / f"global_step{iteration}" / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (None, None, [10, 20, 30, 40, 50, 60]),
        (1, None, [60]),
        (3, None, [40, 50, 60]),
        (9, None, [10, 20, 30, 40, 50, 60]),
        (1, 20, [20, 40, 60]),
        (2, 30, [30, 50, 60]),
        (2, 7, [50, 60]),
    ],
)
def test_kept(tmp_path, keep_last, keep_every, kept):
    make(tmp_path, 10, 20, 30, 40, 50, 60)
    assert apply_retention(tmp_path, 60, keep_last, keep_every) == []
    assert steps(tmp_path) == kept
    assert not list(tmp_path.glob(".*"))


def test_past_checkpoints_of_an_abandoned_part_neither_count_nor_go(tmp_path):
    """A run went back from 60 to 20, and saved 30: 40 to 60 are no newer than that."""
    make(tmp_path, 10, 20, 30, 40, 50, 60)
    apply_retention(tmp_path, 30, 2, None)
    assert steps(tmp_path) == [20, 30, 40, 50, 60]


def test_foreign_folders_stay(tmp_path):
    make(tmp_path, 10, 20, 30)
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "global_step5").mkdir()  # no file of this project
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_text("")
    (tmp_path / "global_step7").write_text("a file")
    (tmp_path / "global_step10-best").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    apply_retention(tmp_path, 30, 1, None)
    gone = before - {path.name for path in tmp_path.iterdir()}
    assert gone == {"global_step10", "global_step20"}


def test_universal_twins_go_first(tmp_path):
    make(tmp_path, 10, 20)
    for iteration in (10, 20):
        (tmp_path / f"global_step{iteration}_universal" / "zero").mkdir(parents=True)
    assert [folder.name for folder in superseded(tmp_path, 20, 1, None)] == [
        "global_step10_universal",
        "global_step10",
    ]
    apply_retention(tmp_path, 20, 1, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step20",
        "global_step20_universal",
    ]


def test_folders_of_deepspeeds_format_go_too(tmp_path):
    make(tmp_path, 20)
    folder = tmp_path / "global_step10"
    folder.mkdir()
    for name in ("config.json", "state.json", "mp_rank_00_model_states.pt"):
        (folder / name).write_text("{}")
    apply_retention(tmp_path, 20, 1, None)
    assert steps(tmp_path) == [20]


def test_what_cannot_be_deleted_is_said_and_stays_whole(tmp_path, monkeypatch):
    make(tmp_path, 10, 20, 30)
    real = os.rename

    def stubborn(source, target):
        if source.name == "global_step10":
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", stubborn)
    (note,) = apply_retention(tmp_path, 30, 1, None)
    assert "global_step10 cannot be deleted: No space left on device" in note
    assert steps(tmp_path) == [10, 30]
    assert (tmp_path / "global_step10" / "manifest.json").exists()
