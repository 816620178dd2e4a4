"""Which checkpoint of a folder is found, and what is not one."""

import zipfile
from itertools import product

import pytest

from megatron.checkpoint.files import CheckpointError
from megatron.formats.legacy_megatron.rank_files import Rank, find_megatron, rank_files, rank_folder

FILE = "model_optim_rng.pt"


@pytest.fixture
def save(tmp_path):
    """Three checkpoints of a single rank; the tracker names the second."""
    for name in ("iter_0000100", "iter_0000250", "release"):
        (tmp_path / name / "mp_rank_00").mkdir(parents=True)
        (tmp_path / name / "mp_rank_00" / FILE).touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (None, "iter_0000100"),
        ("250", "iter_0000250"),
        ("iter_0000250", "iter_0000250"),
        ("global_step250", "iter_0000250"),
        ("release", "release"),
    ],
)
def test_find(wanted, name, save):
    assert find_megatron(save, wanted) == save / name
    archive = save / "all.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in sorted(save.rglob("*")):
            if path != archive:
                packed.write(path, f"inside/{path.relative_to(save)}")
    assert find_megatron(archive, wanted) == archive / "inside" / name


def test_one_checkpoint_or_its_file(save):
    folder = save / "iter_0000250"
    assert find_megatron(folder, None) == find_megatron(folder, "250") == folder
    assert find_megatron(folder / "mp_rank_00" / FILE, None) == folder
    with pytest.raises(CheckpointError, match="iter_0000250 is one checkpoint, and not 100"):
        find_megatron(folder, "100")


def test_without_a_tracker_the_newest(save):
    (save / "latest_checkpointed_iteration.txt").unlink()
    assert find_megatron(save, None) == save / "iter_0000250"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("release", None),
        ("300", r"txt: there is no checkpoint 300; there are iter_0000100, iter_0000250, release"),
        ("", r"latest_checkpointed_iteration.txt has ''; expected a number or release"),
        ("../x", r"latest_checkpointed_iteration.txt has '../x'"),
    ],
)
def test_tracker(text, message, save):
    (save / "latest_checkpointed_iteration.txt").write_text(text)
    if message is None:
        assert find_megatron(save, None) == save / text
        return
    with pytest.raises(CheckpointError, match=message):
        find_megatron(save, None)


def test_what_is_not_there(save, tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint 7; there are iter_0000100"):
        find_megatron(save, "7")
    (tmp_path / "other" / "global_step5").mkdir(parents=True)
    (tmp_path / "other" / "latest_checkpointed_iteration.txt").write_text("5")
    (tmp_path / "other.zip").write_bytes(b"PK\x03\x04 no archive")
    for path in ("other", "nowhere", "other.zip", "latest_checkpointed_iteration.txt"):
        assert find_megatron(tmp_path / path, None) is None, path


def test_ranks(tmp_path):
    names = ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    for name in [*names, "mp_rank_02_x", "something"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).touch()
    actual = rank_files(tmp_path)
    assert list(actual) == [Rank(0, 0), Rank(0, 1), Rank(1, 0), Rank(1, 1)]
    assert actual[Rank(1, 0)] == tmp_path / "mp_rank_00_001" / FILE
    (tmp_path / "mp_rank_00_001" / FILE).unlink()
    with pytest.raises(CheckpointError, match=f"mp_rank_00_001/{FILE} is missing"):
        rank_files(tmp_path)
    (tmp_path / "mp_rank_00_000_000").mkdir()
    (tmp_path / "mp_rank_00_000_000" / FILE).touch()
    with pytest.raises(
        CheckpointError, match="mp_rank_00_000 and mp_rank_00_000_000 are of one rank"
    ):
        rank_files(tmp_path)


def test_expert_ranks(tmp_path):
    for name in product("01", "01", "012"):
        (tmp_path / "mp_rank_0{}_00{}_00{}".format(*name)).mkdir()
        (tmp_path / "mp_rank_0{}_00{}_00{}".format(*name) / FILE).touch()
    actual = rank_files(tmp_path)
    assert list(actual) == [Rank(p, t, e) for p, t, e in product(range(2), range(2), range(3))]
    assert actual[Rank(1, 0, 2)] == tmp_path / "mp_rank_00_001_002" / FILE
    assert all(path.parent.name == rank_folder(r, Rank(2, 2, 3)) for r, path in actual.items())
    (tmp_path / "mp_rank_01_001_002" / FILE).unlink()
    with pytest.raises(CheckpointError, match=f"mp_rank_01_001_002/{FILE} is missing"):
        rank_files(tmp_path)


def test_names_in_an_archive_do_not_lead_out_of_it(tmp_path):
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"../release/mp_rank_00/{FILE}", b"")
        packed.writestr(f"/release/mp_rank_00/{FILE}", b"")
    assert find_megatron(path, None) is None
