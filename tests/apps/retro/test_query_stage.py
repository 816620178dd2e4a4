"""The stage query-neighbors, as a command, on a database that upstream's tools might have written:
its files, where the configuration says that they are, and what it refuses."""

import json
import shutil

import numpy as np
import pytest
from upstream_retro import corpus, gpt_flags, write_corpora, write_project

from megatron.apps.retro.blocks import FileBlock
from megatron.apps.retro.command import run_preprocessing
from megatron.apps.retro.preprocessing import existing
from megatron.apps.retro.query import Retriever, SampleChunks, gpt_samples, neighbors_of
from megatron.config import Setting
from megatron.features.retro.project import RetroProject

pytest.importorskip("h5py")

CHUNK, SEQ_LENGTH, PER_SAMPLE = 32, 128, 4
BLOCK = 30
"""Chunks of a file, which is no multiple of a sample's."""


def run(folder, tasks, *flags):
    argv = ["--retro-workdir", str(folder), "--retro-tasks", tasks]
    argv += ["--bert-embedder-type", "hashing", "--retro-block-size", str(BLOCK), *flags]
    run_preprocessing(None, argv)


def work_on(folder):
    return existing({"retro_project_dir": Setting(str(folder), "test")}, compared=False)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A project with a database in upstream's layout and the index of its chunks."""
    folder = tmp_path_factory.mktemp("retro")
    corpora = [corpus("a", 20, 1), corpus("b", 12, 2)]
    prefixes = write_corpora(folder, corpora)
    flags = gpt_flags(prefixes, SEQ_LENGTH, train_samples=20)
    write_project(folder / "project", corpora, prefixes, flags, CHUNK)
    config = json.loads((folder / "project" / "config.json").read_text())
    (folder / "project" / "config.json").write_text(
        json.dumps(config | {"retro_block_size": BLOCK})
    )
    run(folder / "project", "index-build")
    return folder / "project"


@pytest.fixture
def project(indexed, tmp_path):
    return shutil.copytree(indexed, tmp_path / "project")


def test_files_of_all_parts(project):
    """As many rows as training reads chunks, in blocks; each is what the search finds."""
    run(project, "query-pretraining-neighbors")
    work = work_on(project)
    retriever = Retriever(work.project, work.embedder, flags=work.config)
    numbers = {prefix: n for n, prefix in enumerate(retriever.database.sources)}
    names = RetroProject(project).settings["retro_neighbor_dirs"]
    assert sorted(p.name for p in (project / "query").iterdir()) == sorted(names.values())
    for part, samples in gpt_samples(work.run).items():
        assert (samples.count, part) in {(20, "train"), (16, "valid"), (8, "test")}
        chunks = SampleChunks(samples, PER_SAMPLE, CHUNK, numbers)
        whole = FileBlock(0, len(chunks), project)
        expected = neighbors_of(chunks, retriever, 20, whole)["neighbors"]
        table = RetroProject(project).neighbors(part)
        assert len(table) == samples.count and names[part].startswith(f"{part}_")
        assert len(list((project / "query" / names[part]).iterdir())) == -(-len(chunks) // BLOCK)
        np.testing.assert_array_equal(table.chunk_rows(0, len(chunks)), expected)


def test_another_search_has_files_of_its_own(project):
    """And the configuration names those of the last one."""
    run(project, "query-neighbors")
    before = RetroProject(project).settings["retro_neighbor_dirs"]
    run(project, "query-neighbors", "--retro-query-num-neighbors-save", "5")
    after = RetroProject(project).settings["retro_neighbor_dirs"]
    assert not set(before.values()) & set(after.values())
    first, second = (project / "query" / names["train"] for names in (before, after))
    assert first.is_dir() and second.is_dir()
    table = RetroProject(project).neighbors("train")
    assert table.kept == 5
    run(project, "query-neighbors")
    assert RetroProject(project).settings["retro_neighbor_dirs"] == before
    np.testing.assert_array_equal(
        RetroProject(project).neighbors("train").rows(7)[:, :5], table.rows(7)
    )


def test_validation_is_of_the_search_that_the_project_names(project):
    """Comparing nothing, because flags or database are others, would look like success."""
    run(project, "query-neighbors")
    run(project, "query-neighbors", "--retro-task-validate", "1")
    with pytest.raises(ValueError, match=r"train_\w+ is of another search than this run's; give"):
        run(
            *(project, "query-neighbors", "--retro-task-validate", "1"),
            *("--retro-query-num-neighbors-save", "5"),
        )


def test_more_kept_than_searched_for_is_refused(project):
    with pytest.raises(ValueError, match="--retro-query-num-neighbors-save 20 is more than"):
        run(project, "query-neighbors", "--retro-query-num-neighbors-query", "10")


def test_a_missing_stage_is_named(project):
    shutil.rmtree(project / "index")
    with pytest.raises(ValueError, match="--retro-tasks index-"):
        run(project, "query-neighbors")
    shutil.rmtree(project / "db")
    with pytest.raises(ValueError, match="--retro-tasks db-build"):
        run(project, "query-neighbors")
