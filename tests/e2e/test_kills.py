"""Killed by SIGKILL at any moment, a run that is started again continues at or after the last step
that it said it had saved, and ends with the weights of a run that was never killed."""

import contextlib
import os
import random
import re
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from warm_runs import alive, kill, wait

ROOT = Path(__file__).parents[2]
STEPS = 24
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 99 "
    f"--mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 --train-iters {STEPS} "
    "--log-interval 1 --zero-stage 1 --keep-last 3"
).split()
MODES = {
    "sync": ["--save-interval", "2"],
    "async": ["--save-interval", "1", "--async-save"],
}


def incomplete(save):
    """The folders that saves are writing, or that killed ones left; each its own inode."""
    with contextlib.suppress(FileNotFoundError):
        return {(e.name, e.inode()) for e in os.scandir(save) if e.name.endswith(".incomplete")}
    return set()


def text(output):
    return output.read_text(errors="replace") if output.exists() else ""


def announced(printed):
    return [int(step) for step in re.findall(r"saved checkpoint at iteration (\d+) ", printed)]


def wait_for_a_save(processes, save, chance):
    """Until some save has begun, and a part of the time that one takes."""
    for _ in range(chance.randint(1, 3)):
        before = incomplete(save)
        wait(processes, lambda before=before: incomplete(save) - before)
    time.sleep(chance.uniform(0, 0.04))


def wait_anywhere(processes, output, chance):
    """Until some moment of the start, or between steps."""
    if chance.random() < 0.4:
        time.sleep(chance.uniform(0, 2))
        return
    wait(processes, lambda: "iteration " in text(output).partition("layout:")[2])
    time.sleep(chance.uniform(0, 0.4))


def finish(warm, argv, size, output):
    processes = warm.start(argv, size, output)
    wait(processes, lambda: False, pause=0.01)
    printed = text(output)
    assert announced(printed)[-1:] == [STEPS], printed
    return printed


@pytest.fixture(scope="module")
def unbroken(warm, tmp_path_factory):
    """The run that was never killed."""
    made = {}

    def make(size):
        if size not in made:
            folder = tmp_path_factory.mktemp(f"unbroken{size}")
            finish(warm, [*FLAGS, "--save", folder / "save"], size, folder / "output")
            made[size] = folder / "save"
        return made[size]

    return make


def check_continues(printed, last):
    """That a run began at or after the last step that was said to be saved."""
    found = re.search(r"resumed from \S+ at iteration (\d+)", printed)
    begun = int(found[1]) if found else 0
    started = found or "starting from random weights" in printed
    assert begun >= last or not started, f"step {last} was saved:\n{printed}"
    assert "error:" not in printed, printed


def check_same_weights(ours, theirs):
    ours, theirs = (save / f"global_step{STEPS}" for save in (ours, theirs))
    files = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert files == sorted(path.name for path in ours.glob("*.safetensors"))
    for file in files:
        expected, found = load_file(theirs / file), load_file(ours / file)
        assert found.keys() == expected.keys()
        for key in expected:
            assert found[key].tobytes() == expected[key].tobytes(), (file, key)


SAMPLE = [("async", 2, 3)]
WHOLE = [("sync", 1, 3), ("sync", 1, 30), ("async", 1, 30), ("sync", 2, 20), ("async", 2, 20)]


@pytest.mark.parametrize(
    ("mode", "size", "kills"),
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.proof) for case in WHOLE)],
)
def test_killed_at_random_moments(warm, unbroken, tmp_path, mode, size, kills, record_property):
    chance = random.Random(f"{mode}{size}{kills}")
    inside = runs = done = resumed = 0
    while done < kills:
        save = tmp_path / f"run{runs}"
        argv = [*FLAGS, *MODES[mode], "--save", save, "--load", save]
        last = attempt = 0
        while done < kills and (save / f"global_step{STEPS}").exists() is False:
            output = tmp_path / f"output{runs}-{attempt}"
            left = incomplete(save)
            processes = warm.start(argv, size, output)
            if done % 2:
                wait_anywhere(processes, output, chance)
            else:
                wait_for_a_save(processes, save, chance)
            ended = not alive(processes)
            kill(processes)
            saving = bool(incomplete(save) - left)
            printed = text(output)
            check_continues(printed, last)
            resumed += "resumed from" in printed
            last = max([last, *announced(printed)])
            attempt += 1
            if not ended:
                done += 1
                inside += saving
        printed = finish_or_resume(warm, argv, size, tmp_path / f"output{runs}-last", last)
        resumed += "resumed from" in printed
        check_same_weights(save, unbroken(size))
        assert not list(save.glob(".global_step*"))
        runs += 1
    line = (
        f"{mode}, {size} processes: {done} kills, {inside} of them with a folder half written, "
        f"{resumed} resumes, {runs} runs to the end"
    )
    record_property("kills", line)
    print(line)
    assert inside >= kills // 4, "the kills are there to fall into saves"


def finish_or_resume(warm, argv, size, output, last):
    """Lets the run come to its end, whether it has a step left to do or not."""
    processes = warm.start(argv, size, output)
    wait(processes, lambda: False, pause=0.01)
    printed = text(output)
    check_continues(printed, last)
    return printed
