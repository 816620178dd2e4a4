"""A project is one run's at a time, and what cannot be used or written is named."""

import errno
import sys
from contextlib import ExitStack

import pytest
import upstream_retro as upstream

from megatron.apps.retro.blocks import naming_full_disks
from megatron.apps.retro.command import run_preprocessing
from megatron.apps.retro.config import RetroPreprocessConfig
from megatron.apps.retro.preprocessing import configured
from megatron.run.run import RunToolParser

pytest.importorskip("h5py")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    corpora = [upstream.corpus("a", 20, 1)]
    (prefix,) = upstream.write_corpora(tmp_path_factory.mktemp("corpora"), corpora)
    return [
        *("--data-path", prefix, "--split", "80,15,5", "--train-samples", "8"),
        *("--global-batch-size", "4", "--eval-interval", "5", "--eval-iters", "2"),
        *("--seq-length", "64", "--retro-gpt-chunk-length", "16"),
        *("--tokenizer-type", "ByteLevelTokenizer", "--bert-embedder-type", "hashing"),
    ]


def run(folder, *words):
    run_preprocessing(None, ["--retro-project-dir", str(folder), *words])


def test_two_runs_do_not_write_to_a_project(words, tmp_path):
    """The second one would delete what the first one is writing."""
    folder = tmp_path / "project"
    settings = RunToolParser(RetroPreprocessConfig, None).settings(
        ["--retro-project-dir", str(folder), *words]
    )
    with ExitStack() as held:
        configured(settings, held)
        written = folder / "a.hdf5.partial-0"
        written.touch()
        with pytest.raises(ValueError, match=r"project: another run is writing to it .*\.lock"):
            run(folder, "--retro-tasks", "db-build")
        assert written.exists()
    run(folder, "--retro-tasks", "db-build")
    assert not written.exists()


def test_samples_of_part_of_a_chunk_are_refused(words, tmp_path):
    with pytest.raises(ValueError, match=r"--seq-length 100 is no multiple of .*chunk-length 16"):
        run(tmp_path / "project", *words, "--seq-length", "100")
    assert not (tmp_path / "project").exists()


def test_a_project_that_is_a_file(words, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"--retro-project-dir \S*file cannot be made: .* name anoth"):
        run(tmp_path / "file", *words)


def test_other_data_are_named_as_on_the_command_line(words, tmp_path):
    run(tmp_path, *words, "--retro-tasks", "db-build")
    other = r"--data-path 1 \S*b: retro_gpt_data_path of \S*config.json is \S*a, which"
    with pytest.raises(ValueError, match=other):
        run(tmp_path, "--data-path", "1", words[1][:-1] + "b")


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "x cannot be written: full; free space on the disk, and run stage again"),
        (errno.EROFS, "x cannot be written: full; allow writing there, and run stage again"),
    ],
)
def test_what_cannot_be_written_is_named_once(tmp_path, number, told):
    path = tmp_path / "x"
    with (
        pytest.raises(OSError, match=told) as found,
        naming_full_disks(tmp_path, "all"),
        naming_full_disks(path, "stage"),
    ):
        raise OSError(number, "full")
    assert str(found.value).count("cannot be written") == 1


def test_a_missing_library_is_named_before_any_work(words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"need h5py: run pip install -e"):
        run(tmp_path / "project", *words)
    assert not (tmp_path / "project").exists()
    monkeypatch.undo()
    run(tmp_path, *words, "--retro-tasks", "db-build")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"--retro-index-str IVF4,Flat needs faiss"):
        run(tmp_path, "--retro-tasks", "index-train", "--retro-index-str", "IVF4,Flat")
    assert not (tmp_path / "index").exists()
