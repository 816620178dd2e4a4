"""Projects of this tool and of Megatron-LM's: where their configuration is, what a run takes from
it, and the names of tasks."""

import json
import os

import numpy as np
import pytest
import upstream_retro as upstream

import megatron.features.retro.project as project_module
from megatron.apps.retro.command import STAGES, stages_of
from megatron.apps.retro.preprocessing import project_run
from megatron.config import ConfigError
from megatron.features.retro.hdf5 import write_arrays
from megatron.features.retro.project import RetroProject
from megatron.training.plan import TrainingPlan

pytest.importorskip("h5py")

LENGTH = 16


@pytest.fixture
def moved(tmp_path):
    """A project of 2024 with its data inside, and a path relative to it, in another place than the
    one where it was made."""
    corpora = [upstream.corpus("first", 40, 1), upstream.corpus("second", 20, 2)]
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    upstream.write_corpora(folder / "data", corpora)
    names = [each.name for each in corpora]
    flags = upstream.gpt_flags(names, 64, 40)
    upstream.write_project(folder, corpora, names, flags, LENGTH)
    os.rename(folder, tmp_path / "elsewhere")
    return corpora, tmp_path / "elsewhere"


@pytest.mark.parametrize("file", ["config.json", "args.json"])
def test_a_project_with_its_data_inside(moved, file):
    corpora, folder = moved
    os.rename(folder / "config.json", folder / file)
    project = RetroProject(folder)
    assert (project.chunk_length, project.seq_length) == (LENGTH, 64)
    paths = [str(folder / "data" / each.name) for each in corpora]
    database = project.database()
    assert database.sources == paths
    for number, row in enumerate(database.table.tolist()):
        text = corpora[row[0]].documents[row[1]][row[2] : row[3]]
        np.testing.assert_array_equal(database.tokens(number)[: len(text)], text)
    taken = project.data_settings()
    assert taken["data_path"].value == ("2", paths[0], "1", paths[1])
    assert taken["data_path"].origin == f"{folder / file}: retro_gpt_data_path"
    assert taken["retro_gpt_chunk_length"].value == LENGTH
    assert taken["train_samples"].value == 40
    assert not {"block_size", "num_workers"} & taken.keys()


def test_the_run_of_a_project(moved):
    """Its samples are those that neighbours are for: 10 steps, 3 evaluations of 2 batches."""
    run = project_run(RetroProject(moved[1]))
    assert TrainingPlan(run.config).sample_counts == (40, 24, 8)
    assert run.config.data.split == "80,15,5"
    assert run.tokenizer.eod == upstream.EOD


def test_values_are_recorded(moved):
    project = RetroProject(moved[1])
    project.record({"retro_neighbor_dirs": {"train": "query/train_x"}})
    again = RetroProject(moved[1])
    assert again.settings["retro_neighbor_dirs"] == {"train": "query/train_x"}
    assert again.chunk_length == LENGTH


def test_neighbors_of_2023_stay_known_when_values_are_recorded(moved):
    """Its configuration names no folders, nor does the file that a stage writes then."""
    folder = moved[1]
    settings = json.loads((folder / "config.json").read_text())
    assert "retro_neighbor_dirs" not in settings
    (folder / "config.json").unlink()
    (folder / "args.json").write_text(json.dumps(settings))
    (folder / "query/train_x").mkdir(parents=True)
    write_arrays(folder / "query/train_x/00-16.hdf5", {"neighbors": np.zeros((16, 2), np.int64)})
    assert len(RetroProject(folder).neighbors("train")) == 4
    RetroProject(folder).record({"retro_embedder": {"type": "hashing"}})
    assert len(RetroProject(folder).neighbors("train")) == 4


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", r"config.json cannot be read: .*; restore the file"),
        ("[1]", "config.json is no JSON object"),
        ("{}", r"config.json has no retro_gpt_chunk_length"),
    ],
)
def test_damaged_configurations(tmp_path, content, told):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=told):
        _ = RetroProject(tmp_path).chunk_length


@pytest.mark.parametrize(
    ("tasks", "stages"),
    [
        ("build", list(STAGES)),
        ("db-build", ["db-build"]),
        ("index-build", ["index-train", "index-add"]),
        ("query-pretraining-neighbors", ["query-neighbors"]),
        ("pretraining-query-neighbors", ["query-neighbors"]),
        ("index-train, query-neighbors", ["index-train", "query-neighbors"]),
    ],
)
def test_names_of_tasks(tasks, stages):
    assert stages_of(tasks) == stages


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match=r"--retro-tasks index-bild: .*nearest is index-build"):
        stages_of("db-build,index-bild")


def test_the_list_of_datasets_is_damaged(moved):
    project = RetroProject(moved[1])
    project.datasets_file.write_text(json.dumps([{}])[:-1])
    with pytest.raises(ValueError, match=r"indexed_dataset_infos.json cannot be read.* db-build"):
        project.database()


def test_no_connection_is_opened_because_a_project_asks_for_it(moved, monkeypatch):
    """Only where a flag says where to keep what is fetched."""
    folder = moved[1]

    def fetched(*args):
        raise OSError(f"fetched {args}")

    monkeypatch.setattr(project_module, "open_indexed", fetched)
    url = "http://127.0.0.1:9/x"
    file = folder / "db" / "indexed_dataset_infos.json"
    file.write_text(json.dumps([{"prefix": url}]))
    with pytest.raises(ConfigError, match="names data at http.*--object-storage-cache-path DIR"):
        RetroProject(folder).database(0)
    RetroProject(folder).record({"retro_gpt_data_path": [url]})
    with pytest.raises(ConfigError, match=f"{folder} names data at {url}"):
        RetroProject(folder).data_settings()
    allowed = RetroProject(folder, str(folder / "cache"))
    assert allowed.data_settings()["data_path"].value == (url,)
    with pytest.raises(OSError, match=f"fetched .'{url}', '{folder / 'cache'}'"):
        allowed.database(0)
