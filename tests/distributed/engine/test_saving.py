"""Saves: in the background as in the foreground, on a disk that fails, and how many are kept."""

import contextlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from deepspeed.runtime import engine as deepspeed_engine
from safetensors.numpy import load_file
from samples import sampled
from training_jobs import SAVED_LAYOUTS, TINY, run, train

from megatron.checkpoint import writer
from megatron.checkpoint.folder import complete_tags
from megatron.checkpoint.manifest import verify
from megatron.engine import saving

STEPS = 6
FLAGS = [*TINY, "--train-iters", str(STEPS)]
DP2 = ["--zero-stage", "1"]
SAMPLE = {"zero3-dp2"}
SAVES = 4


def slowly(seconds=0.15):
    """Writing takes longer than steps do, so that a background save sees the next ones."""
    real = writer.write_tensors

    def write(path, tensors, *finite):
        time.sleep(seconds)
        return real(path, tensors, *finite)

    return mock.patch.object(writer, "write_tensors", write)


def full(rank, iterations=None):
    """One rank finds no room, at the given iterations or at all."""
    real = writer.write_tensors

    def write(path, tensors, *finite):
        at = int(re.search(r"global_step(\d+)", str(path))[1])
        if os.environ["RANK"] == str(rank) and (iterations is None or at in iterations):
            raise OSError(28, "No space left on device")
        return real(path, tensors, *finite)

    return mock.patch.object(writer, "write_tensors", write)


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.proof) for n in SAVED_LAYOUTS]
)
def test_background_saves_against_foreground_saves(pool, tmp_path, name):
    """Every tensor of every step, although later steps run while it is written."""
    size, layout = SAVED_LAYOUTS[name]
    flags = [*FLAGS, *layout, "--save-interval", "1", "--train-iters", str(SAVES)]
    pool.run(size, run, [*flags, "--save", str(tmp_path / "a")])
    results = pool.run(size, run, [*flags, "--save", str(tmp_path / "b"), "--async-save"], slowly)
    assert [error for _, error in results] == [None] * size
    for step in range(1, SAVES + 1):
        theirs, ours = (tmp_path / run / f"global_step{step}" for run in "ab")
        verify(ours)
        names = sorted(path.name for path in theirs.iterdir() if path.is_file())
        assert names == sorted(path.name for path in ours.iterdir() if path.is_file())
        for file in (name for name in names if name.endswith(".safetensors")):
            expected, found = load_file(theirs / file), load_file(ours / file)
            assert found.keys() == expected.keys()
            for key in expected:
                assert np.array_equal(found[key], expected[key]), (step, file, key)
        for file in ("state.json", "index.json"):
            assert (theirs / file).read_text() == (ours / file).read_text()


def announced(output):
    return [int(number) for number in re.findall(r"saved checkpoint at iteration (\d+)", output)]


def rows(save):
    found = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == "save"]


@pytest.mark.proof
def test_stall_is_measured_and_a_second_save_waits(pool, tmp_path):
    flags = [*FLAGS, *DP2, "--save", str(tmp_path), "--async-save"]
    output, _ = pool.run(2, run, [*flags, "--save-interval", "3"], slowly, 0.4)[0]
    assert announced(output) == [3, 6]
    assert re.search(r"saved checkpoint at iteration 3 .* MB in .* s .*save stall \d+ ms", output)
    first, second = rows(tmp_path)
    # Three files a rank. The first save stalls for the copy alone, the second waits for the first.
    assert first["seconds"] > 1.2 > 0.6 > first["stall_seconds"]
    assert second["stall_seconds"] > 0.5
    assert first["bytes"] == sum(
        path.stat().st_size
        for path in (tmp_path / "global_step3").rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )


ASYNC = ["--async-save"]


@pytest.mark.parametrize(
    "rank, mode", sampled([(0, []), (0, ASYNC), (1, []), (1, ASYNC)], lambda c: c == (1, ASYNC))
)
def test_a_save_that_fails_is_said_and_training_continues(pool, tmp_path, mode, rank):
    flags = [*FLAGS, *DP2, *mode, "--save", str(tmp_path), "--save-interval", "2"]
    results = pool.run(2, run, flags, full, rank, [4])
    assert [error for _, error in results] == [None, None]
    output = results[0][0]
    assert announced(output) == [2, 6]
    assert "WARNING: no checkpoint at iteration 4" in output
    assert f"rank {rank}: [Errno 28] No space left on device; earlier checkpoints are" in output
    assert complete_tags(tmp_path) == ["global_step2", "global_step6"]
    assert not list(tmp_path.glob(".global_step*"))


DEEPSPEED = ["--checkpoint-format", "deepspeed"]
ENGINE_FILES = {
    "zero0": (2, ["--zero-stage", "0"], "mp_rank_00_model_states.pt"),
    "zero1": (2, ["--zero-stage", "1"], "optim_states.pt"),
    "zero1-scripts": (2, ["--zero-stage", "1"], "zero_to_fp32.py"),
    "zero1-folder": (2, ["--zero-stage", "1"], ""),
    "zero3": (2, ["--zero-stage", "3"], "optim_states.pt"),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"], "layer_"),
    "tp2": (2, ["--tensor-model-parallel-size", "2", "--zero-stage", "1"], "optim_states.pt"),
}
"""Processes, layout, and a part of the name of the file for which there is no room."""


@contextlib.contextmanager
def full_for_deepspeed(ranks, name, iteration):
    """Lets files with this part of a name fail on these ranks at one iteration, as on a full disk;
    without a name the folder."""
    files, folders, copy = torch.save, os.makedirs, deepspeed_engine.copyfile

    def check(path):
        saving = any(Path(path).parent.glob(f".global_step{iteration}*"))
        if int(os.environ["RANK"]) in ranks and (saving or f"global_step{iteration}" in str(path)):
            raise OSError(28, "No space left on device")

    def save(value, path, **options):
        if name and name in Path(path).name:
            check(path)
        return files(value, path, **options)

    def make(path, *args, **options):
        if not name:
            check(path)
        return folders(path, *args, **options)

    def copied(source, target):
        if name and name in Path(target).name:
            check(target)
        return copy(source, target)

    with (
        mock.patch.object(torch, "save", save),
        mock.patch.object(os, "makedirs", make),
        mock.patch.object(deepspeed_engine, "copyfile", copied),
    ):
        yield


@pytest.mark.parametrize(
    ("case", "ranks"),
    sampled(
        [
            *((case, (0,)) for case in ENGINE_FILES),
            *((case, (1,)) for case in ("zero1", "zero3", "pp2", "tp2")),
            ("zero1", (0, 1)),
        ],
        lambda c: c == ("zero1", (1,)),
    ),
)
def test_a_save_of_deepspeeds_engine_that_fails_on_a_rank_fails_on_all(pool, tmp_path, case, ranks):
    """DeepSpeed's ranks wait for each other between their files."""
    size, layout, name = ENGINE_FILES[case]
    flags = [*FLAGS, *layout, *DEEPSPEED, "--save", str(tmp_path), "--save-interval", "2"]
    results = pool.run(size, run, flags, full_for_deepspeed, ranks, name, 4)
    assert [error for _, error in results] == [None] * size
    output = results[0][0]
    assert announced(output) == [2, 6]
    assert "WARNING: no checkpoint at iteration 4" in output
    assert f"rank {ranks[0]}: " in output and "No space left on device" in output
    assert sorted(path.name for path in tmp_path.glob("*global_step*")) == [
        "global_step2",
        "global_step6",
    ]
    assert (tmp_path / "latest").read_text() == "global_step6"


@pytest.mark.parametrize("mode", sampled([[], ASYNC], lambda mode: mode == ASYNC))
def test_a_last_save_that_fails_fails_the_run(pool, tmp_path, mode):
    """On every rank, with the reason that one has; the older checkpoint is resumed from."""
    flags = [*FLAGS, *DP2, *mode, "--save", str(tmp_path), "--save-interval", "4"]
    results = pool.run(2, run, flags, full, 1, [6])
    for _, error in results:
        assert f"saving to {tmp_path} failed: rank 1: [Errno 28] No space left" in error
    assert announced(results[0][0]) == [4]
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert not list(tmp_path.glob(".global_step*"))
    output, error = pool.run(2, run, [*flags, "--load", str(tmp_path)])[0]
    assert error is None and "global_step4 at iteration 4" in output and announced(output) == [6]


def test_a_run_that_is_stopped_tries_once_more(pool, tmp_path):
    """The save of the step at which it stops failed, for a moment; leaving tries again."""
    flags = [*FLAGS, *DP2, "--save", str(tmp_path), "--save-interval", "4", "--exit-interval", "4"]
    output, error = pool.run(2, run, flags, failing_once)[0]
    assert error is None
    assert "WARNING: no checkpoint at iteration 4" in output and announced(output) == [4]


def failing_once():
    real, failures = writer.publish, iter([OSError(5, "Input/output error")])

    def publish(*args):
        for error in failures:
            raise error
        return real(*args)

    return mock.patch.object(writer, "publish", publish)


def test_retention_during_a_run(pool, tmp_path):
    flags = [*FLAGS, *DP2, "--save", str(tmp_path), "--save-interval", "1"]
    pool.run(2, run, [*flags, "--keep-last", "2", "--keep-every", "3", "--async-save"])
    assert complete_tags(tmp_path) == ["global_step3", "global_step5", "global_step6"]
    assert not list(tmp_path.glob(".global_step*"))


def test_nothing_is_deleted_for_a_save_that_failed(pool, tmp_path):
    flags = [*FLAGS, *DP2, "--save", str(tmp_path), "--save-interval", "2", "--keep-last", "1"]
    pool.run(2, run, flags, full, 0, [4, 6])
    assert complete_tags(tmp_path) == ["global_step2"]


@pytest.mark.parametrize("mode", sampled([[], ASYNC], lambda mode: mode == ASYNC))
def test_universal_twins(pool, tmp_path, mode):
    flags = [*FLAGS, *DP2, *mode, "--save", str(tmp_path), "--save-interval", "3"]
    output, error = pool.run(2, run, [*flags, "--save-universal", "--keep-last", "1"])[0]
    assert error is None and "WARNING" not in output
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == [
        "global_step6",
        "global_step6_universal",
    ]
    assert (tmp_path / "latest_universal").read_text().strip() == "global_step6_universal"


def test_no_save_optim_is_weights_only(pool, tmp_path):
    flags = [*FLAGS, *DP2, "--save", str(tmp_path)]
    pool.run(1, train, [*flags, "--no-save-optim", "--no-save-rng"])
    names = {path.name for path in (tmp_path / "global_step6").iterdir()}
    assert not any(name.startswith(("optimizer", "random")) for name in names)
    _, message = pool.run(1, run, [*flags, "--load", str(tmp_path), "--train-iters", "9"])[0]
    assert "exp_avg" in message and "--no-load-optim" in message


def test_two_runs_do_not_save_into_one_folder(pool, tmp_path):
    """The second is refused on all its ranks, before it has done anything."""
    lock = saving.lock_folder(tmp_path)
    try:
        results = pool.run(2, run, [*FLAGS, *DP2, "--save", str(tmp_path)])
        assert f"process {os.getpid()} on" in results[0][1] and "another --save" in results[0][1]
        assert results[1][1] is not None
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    finally:
        lock.release()
    assert pool.run(2, run, [*FLAGS, *DP2, "--save", str(tmp_path)])[0][1] is None


def run_in_trouble(argv, folder):
    """Before the second save the folder of checkpoints is deleted, and the clock set back."""
    real, now, saves = saving.CheckpointWriter.save, time.time, []

    def save(self, *args):
        saves.append(args)
        if len(saves) == 2:
            shutil.rmtree(folder)
        return real(self, *args)

    def clock():
        return now() - 400 * 86_400 * (len(saves) > 1)

    with (
        mock.patch.object(saving.CheckpointWriter, "save", save),
        mock.patch.object(time, "time", clock),
    ):
        return run(argv)


def test_a_deleted_folder_and_a_clock_that_is_set_back(pool, tmp_path):
    folder = tmp_path / "saved"
    flags = [*FLAGS, "--save", str(folder), "--save-interval", "2"]
    assert pool.run(1, run_in_trouble, flags, str(folder))[0][1] is None
    assert complete_tags(folder) == ["global_step4", "global_step6"]


def test_a_place_that_cannot_be_written_is_named_before_training(pool, tmp_path):
    (tmp_path / "file").write_text("in the way")  # also fails for root, unlike permissions
    error = pool.run(1, run, [*FLAGS, "--save", str(tmp_path / "file" / "x")])[0][1]
    assert f"--save {tmp_path}/file/x: cannot write to it (Not a directory)" in error


def slow_to_publish(seconds):
    """The first rank makes the checkpoint visible later than the others wait."""
    real = writer.publish

    def publish(*args):
        time.sleep(seconds)
        return real(*args)

    return mock.patch.object(writer, "publish", publish)


@pytest.mark.proof
@pytest.mark.parametrize("mode", [[], ASYNC])
def test_a_checkpoint_that_is_whole_is_not_called_missing(pool, tmp_path, mode):
    """The ranks could not agree that it is there, since making it visible took too long."""
    flags = [*FLAGS, *DP2, *mode, "--save", str(tmp_path), "--distributed-timeout-minutes", "0.05"]
    output, error = pool.run(2, run, flags, slow_to_publish, 5)[0]
    assert f"WARNING: {tmp_path}/global_step{STEPS} is whole, but its save did not" in output
    assert "no checkpoint at iteration" not in output
    assert "could not agree" in error
    verify(tmp_path / f"global_step{STEPS}")
    assert (tmp_path / "latest").read_text() == f"global_step{STEPS}"
