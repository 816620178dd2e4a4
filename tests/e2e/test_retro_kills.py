"""Killed by SIGKILL at any moment, a stage of a Retro project that is started again ends with the
files of one that was never killed, byte for byte."""

import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from samples import sampled
from upstream_retro import corpus, gpt_flags, write_corpora
from warm_runs import WarmRuns, alive, kill, wait

pytest.importorskip("h5py")

STAGES = ("db-build", "index-train", "index-add", "query-neighbors")
INDICES = {"exact": "Flat", "clusters": "IVF8,Flat"}
FLAGS = (
    "--retro-gpt-chunk-length 32 --retro-block-size 64 --retro-doc-block-size 8 "
    "--bert-embedder-type hashing --retro-hashing-width 32 --retro-index-recall-queries 20"
).split()


@pytest.fixture(scope="module")
def warm():
    stages = ("database", "index.stages", "query")
    runs = WarmRuns(
        "tools.retro.preprocess_data", *(f"megatron.apps.retro.{stage}" for stage in stages)
    )
    yield runs
    runs.stop()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The flags of two corpora of about 900 chunks, with 40 + 24 + 8 samples of 4 chunks."""
    folder = tmp_path_factory.mktemp("corpora")
    prefixes = write_corpora(folder, [corpus("a", 50, 1), corpus("b", 30, 2)])
    flags = gpt_flags(prefixes, seq_length=128, train_samples=40)
    words = [[f"--{name.replace('_', '-')}", value] for name, value in flags.items()]
    return [
        str(word)
        for name, value in words
        for word in (name, *(value if isinstance(value, list) else [value]))
    ]


@pytest.fixture(scope="module")
def whole(warm, data, tmp_path_factory):
    """For each index the folders of a project before the first stage and after each, none of which
    was killed."""
    made = {}

    def of(index):
        if index not in made:
            made[index] = _whole(warm, data, index, tmp_path_factory.mktemp(index))
        return made[index]

    return of


def _whole(warm, data, index, folder):
    folders = [folder / "before"]
    folders[0].mkdir()
    for stage in STAGES:
        project = folder / stage
        shutil.copytree(folders[-1], project)
        run_to_the_end(warm, [*data, *flags_of(project, stage, index)], 1)
        folders.append(project)
    return folders


def flags_of(project, stage, index):
    return [
        *FLAGS, "--retro-project-dir", project, "--retro-tasks", stage,
        "--retro-index-str", INDICES[index],
    ]  # fmt: skip


def run_to_the_end(warm, argv, size):
    folder = Path(argv[argv.index("--retro-project-dir") + 1])
    output = folder.parent / f"{folder.name}.txt"
    processes = warm.start(argv, size, output)
    wait(processes, lambda: False, pause=0.005)
    printed = output.read_text()
    assert "error" not in printed.lower() and "Traceback" not in printed, printed
    return printed


def content(project):
    return {
        str(path.relative_to(project)): path.read_bytes()
        for path in sorted(project.rglob("*"))
        if path.is_file()
    }


def wait_for_files(processes, project, count):
    """Until the run has begun so many files more, or has ended."""
    wanted = len(list(project.rglob("*.*"))) + count
    wait(processes, lambda: len(list(project.rglob("*.*"))) >= wanted, pause=0.002)


@pytest.mark.parametrize(
    ("stage", "index", "size", "moments"),
    sampled(
        [("build", "exact", 1, 1)]
        + [(stage, index, 1, 20) for stage in STAGES for index in INDICES]
        + [(stage, "exact", 2, 6) for stage in STAGES],
        lambda case: case[0] == "build",
    ),
)
def test_a_killed_stage_ends_with_the_same_files(
    warm, data, whole, tmp_path, stage, index, size, moments
):
    if index != "exact":
        pytest.importorskip("faiss")
    folders = whole(index)
    number = 0 if stage == "build" else STAGES.index(stage)
    expected = content(folders[-1 if stage == "build" else number + 1])
    new = len(expected) - len(content(folders[number]))
    chance, interrupted = random.Random(f"{stage} {index} {size}"), 0
    for moment in range(moments):
        project = tmp_path / f"{moment}"
        shutil.copytree(folders[number], project)
        argv = [*data, *flags_of(project, stage, index)]
        processes = warm.start(argv, size, tmp_path / "killed.txt")
        wait_for_files(processes, project, chance.randrange(new))
        time.sleep(chance.uniform(0, 0.05))
        interrupted += alive(processes)
        kill(processes)
        run_to_the_end(warm, argv, size)
        found = content(project)
        assert sorted(found) == sorted(expected)
        differing = [name for name in found if found[name] != expected[name]]
        assert not differing, f"after moment {moment}"
        shutil.rmtree(project)
    assert interrupted >= moments / 2, "most were killed at work"


def test_two_processes_write_the_files_of_one(warm, data, whole, tmp_path):
    """Each stage with its own start, as on nodes that share the folder; and blocks are divided."""
    folders = whole("exact")
    shutil.copytree(folders[0], tmp_path / "project")
    run_to_the_end(warm, [*data, *flags_of(tmp_path / "project", "build", "exact")], 2)
    assert content(tmp_path / "project") == content(folders[-1])


def test_validation_computes_the_blocks_again(warm, data, whole, tmp_path):
    """And finds a neighbour that is not the one that it computes."""
    h5py = pytest.importorskip("h5py")
    shutil.copytree(whole("exact")[-1], tmp_path / "project")
    flags = flags_of(tmp_path / "project", "query-neighbors", "exact")
    argv = [*data, *flags, "--retro-task-validate", "1.0"]
    assert "all equal" in run_to_the_end(warm, argv, 1)
    file = sorted((tmp_path / "project" / "query").glob("train_*/*.hdf5"))[1]
    with h5py.File(file, "r+") as opened:
        row = np.roll(opened["neighbors"][5], 1)
        opened["neighbors"][5] = row
    with pytest.raises(AssertionError, match=f"{file.name}: neighbors is not what this run"):
        run_to_the_end(warm, argv, 1)
