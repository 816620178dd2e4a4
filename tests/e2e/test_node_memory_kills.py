"""Ranks killed by SIGKILL at any moment, and nodes that are lost with their memory: a run continues
at or after the last checkpoint in memory that it recorded, with the weights of a run that was not
disturbed."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time

import psutil
import pytest
from safetensors.numpy import load_file
from warm_runs import WarmRuns, alive, kill, wait

STEPS = 40
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 6 --tokenizer-type NullTokenizer --vocab-size 99 "
    f"--mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 --train-iters {STEPS} "
    "--log-interval 1 --non-persistent-save-interval 1 --save-interval 20"
).split()
CASES = {
    "one rank": ("0", ["--zero-stage", "0"]),
    "two nodes, ZeRO 1": ("0,1", ["--zero-stage", "1"]),
    "two nodes, ZeRO 3": ("0,1", ["--zero-stage", "3"]),
    "three nodes": ("0,1,2", ["--zero-stage", "2", "--async-save"]),
    "pipeline": ("0,1", ["--pipeline-model-parallel-size", "2"]),
    "tensors": ("0,1", ["--tensor-model-parallel-size", "2"]),
}
KILLS = 8

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(os.getuid() != 0, reason="nodes have mounts of their own"),
]


@pytest.fixture(scope="module")
def warm():
    runs = WarmRuns(
        "shm_nodes", "deepspeed", "megatron.features.resilience.node_memory.checkpoints"
    )
    yield runs
    runs.stop()


def text(output):
    return output.read_text(errors="replace") if output.exists() else ""


def recorded(save):
    """The last checkpoint, in memory or on the disk, that the run has recorded."""
    found = [0]
    with contextlib.suppress(FileNotFoundError):
        for line in (save / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line may be half written
                row = json.loads(line)
                found += [row["iteration"]] * (row["kind"] in ("memory_save", "save"))
    return max(found)


def weights(save):
    return {
        (path.name, key): values.tobytes()
        for path in (save / f"global_step{STEPS}").glob("*.safetensors")
        for key, values in load_file(path).items()
    }


@pytest.mark.parametrize("name", CASES)
def test_killed_at_random_moments(warm, tmp_path, name, record_property):
    nodes, flags = CASES[name]
    ranks, chance = nodes.count(",") + 1, random.Random(name)
    base, save, left = tmp_path / "nodes", tmp_path / "save", KILLS
    argv = [base, nodes, *FLAGS, *flags, "--save", save, "--load", save]
    begun, lost = [], 0
    while not (save / f"global_step{STEPS}").exists():
        before, output = recorded(save), tmp_path / f"output{len(begun)}"
        processes = warm.start(argv, ranks, output)
        wait(processes, lambda o=output: "layout:" in text(o))
        if left:
            goal = before + chance.randint(1, 6)
            wait(processes, lambda goal=goal: recorded(save) >= goal)
            time.sleep(chance.uniform(0, 0.05))
            left -= alive(processes)
            kill(processes)
        else:
            wait(processes, lambda: False, pause=0.01)
        printed = text(output)
        found = re.search(r"resumed from \S+ at iteration (\d+)", printed)
        begun.append(int(found[1]) if found else 0)
        assert begun[-1] >= before, f"iteration {before} was saved:\n{printed}"
        if left and ranks > 1 and chance.random() < 0.5:
            shutil.rmtree(base / f"node{chance.randrange(ranks)}")
            lost += 1
    assert left == 0 and not list(base.glob("node*/*/*"))
    other = tmp_path / "undisturbed"
    processes = warm.start(
        [base, nodes, *FLAGS, *flags, "--save", other], ranks, tmp_path / "output"
    )
    wait(processes, lambda: False, pause=0.01)
    assert weights(save) == weights(other)
    record_property("kills", f"{KILLS}, of them {lost} with a node; began at {begun}")
    print(f"{name}: began at {begun}, {lost} nodes lost")


def trainer_of(guardian):
    """The process that a guardian has started, once it has."""
    found = []
    wait([guardian], lambda: bool(found.extend(psutil.Process(guardian).children()) or found))
    return found[0].pid


@pytest.mark.parametrize("zero", ["1", "3"])
def test_a_lost_rank_costs_few_steps(warm, tmp_path, zero):
    """Without a checkpoint on the disk, and without --load: each time trainers are started again,
    they continue from memory."""
    base, save, output = tmp_path / "nodes", tmp_path / "save", tmp_path / "output"
    flags = [*FLAGS[:-2], "--zero-stage", zero]
    argv = [base, "0,1", *flags, "--save", save, "--inprocess-restart"]
    guardians = warm.start(argv, 2, output)
    goals = (4, 11, 23)
    for kills, goal in enumerate(goals):
        wait(guardians, lambda goal=goal: recorded(save) >= goal)
        os.kill(trainer_of(guardians[kills % 2]), signal.SIGKILL)
        wait(guardians, lambda kills=kills: text(output).count("resumed from") > kills)
    wait(guardians, lambda: False, pause=0.01)
    printed = text(output)
    begun = re.findall(r"resumed from /dev/shm/\S+ at iteration (\d+)", printed)
    assert len(begun) == len(goals), printed
    assert all(int(one) >= goal for one, goal in zip(begun, goals, strict=True)), printed
    lost = [int(steps) for steps in re.findall(r"(\d+) steps are computed again", printed)]
    assert len(lost) == len(goals) and max(lost) <= 3, printed
    other = tmp_path / "undisturbed"
    processes = warm.start([base, "0,1", *flags, "--save", other], 2, tmp_path / "other")
    wait(processes, lambda: False, pause=0.01)
    assert weights(save) == weights(other)
