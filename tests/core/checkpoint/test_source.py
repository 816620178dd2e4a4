"""Finding a checkpoint, whatever its format."""

import subprocess
import sys

import pytest

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import Format, formats, locate_checkpoint, open_checkpoint, reader
from megatron.formats import available
from megatron.formats.deepspeed_folders.folder import DeepSpeedFolder
from megatron.formats.deepspeed_folders.universal import UniversalFolder


@pytest.fixture
def save(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config()
    for step in (5, 6):
        write_checkpoint(tmp_path, config, random_gpt(config), step=step)
    return tmp_path


@pytest.mark.parametrize("wanted", [None, "6", "global_step6"])
def test_own_format(save, wanted):
    found = locate_checkpoint(save, wanted)
    assert found[:2] == (CheckpointReader, save / "global_step6")
    assert locate_checkpoint(save / "global_step5").folder == save / "global_step5"


def test_nothing_there(tmp_path):
    assert locate_checkpoint(tmp_path) is None
    assert locate_checkpoint(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match="no complete checkpoint 7"):
        locate_checkpoint(tmp_path, "7")
    with pytest.raises(CheckpointError, match="no complete checkpoint found"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("tracker", ["latest", "latest_checkpointed_iteration.txt"])
def test_a_tracker_that_names_nothing(tmp_path, tracker):
    """Training must not start over where there was a checkpoint."""
    (tmp_path / tracker).write_text("global_step9\n")
    with pytest.raises(CheckpointError, match=f"{tracker} names 'global_step9'"):
        locate_checkpoint(tmp_path)


def test_a_file_of_no_format(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a checkpoint")
    with pytest.raises(CheckpointError, match=r"notes\.txt is a file"):
        locate_checkpoint(path)


def test_a_universal_copy_does_not_hide_newer_folders_of_the_engine(tmp_path):
    """Otherwise every restart would go back to the step of the copy."""
    for step in (2, 4):
        (tmp_path / f"global_step{step}").mkdir()
        (tmp_path / f"global_step{step}" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "global_step2_universal" / "zero").mkdir(parents=True)
    (tmp_path / "latest").write_text("global_step4")
    (tmp_path / "latest_universal").write_text("global_step2_universal")
    assert locate_checkpoint(tmp_path)[:2] == (DeepSpeedFolder, tmp_path / "global_step4")
    copy = (UniversalFolder, tmp_path / "global_step2_universal")
    assert locate_checkpoint(tmp_path, "global_step2_universal")[:2] == copy
    assert locate_checkpoint(tmp_path, None, prefer="universal")[:2] == copy


def test_opening_compares_checksums(save):
    path = save / "global_step6" / "weights-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights-00000\.safetensors is damaged"):
        open_checkpoint(save)
    open_checkpoint(save, verify=False)


@pytest.mark.features
def test_titles_are_different():
    assert len({reader(name).title for name in formats()}) == len(formats()) == 15
    assert reader(next(iter(formats()))) is CheckpointReader


@pytest.mark.features
def test_a_format_whose_folder_is_deleted_is_left_out(monkeypatch, tmp_path):
    there = Format("a", "megatron.formats.meta:MetaFolder", needs=("megatron.formats.meta",))
    deleted = Format("b", "megatron.formats.b:Folder", needs=(*there.needs, "megatron.formats.b"))
    assert available([there, deleted]) == (there,)
    (tmp_path / "file").touch()
    monkeypatch.setattr("megatron.checkpoint.source.OTHERS", "megatron.deleted")
    formats.cache_clear()
    try:
        assert list(formats()) == ["native", "adapters"]
        assert locate_checkpoint(tmp_path) is None
    finally:
        formats.cache_clear()


FIND = """
import sys
from pathlib import Path
from megatron.checkpoint.source import locate_checkpoint
for path in sys.argv[1:]:
    found = locate_checkpoint(path)
    loaded = {name for name in sys.modules if name.startswith(("megatron.formats", "deepspeed"))}
    print(found and found.form.__name__, sorted(loaded))
"""


def test_other_formats_are_imported_where_the_native_one_finds_nothing(save, tmp_path):
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    (other / "global_step2").mkdir(parents=True)
    (other / "global_step2" / "mp_rank_00_model_states.pt").touch()
    paths = (save, tmp_path / "absent", tmp_path / "empty", other)
    run = subprocess.run([sys.executable, "-c", FIND, *paths], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *before, found = run.stdout.splitlines()
    assert before == ["CheckpointReader []", "None []", "None []"]
    assert found.startswith("DeepSpeedFolder ['megatron.formats', ")
    assert "huggingface" not in found and "legacy_megatron.reader" not in found
    assert "'deepspeed" not in found
