"""Runs with --inprocess-restart whose ranks are killed, stopped or lost: they continue by
themselves, and end with the weights of a run that nothing happened to."""

import os
import random
import re
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file
from warm_runs import alive, kill, output_of, status_of, wait

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STEPS = 80
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 99 "
    f"--mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 --train-iters {STEPS} "
    "--log-interval 1 --save-interval 10 --keep-last 2 --inprocess-restart"
).split()
LAYOUTS = {
    "zero 0": (2, ["--zero-stage", "0"]),
    "zero 1": (2, ["--zero-stage", "1"]),
    "zero 2": (2, ["--zero-stage", "2", "--bf16"]),
    "zero 3": (2, ["--zero-stage", "3"]),
    "fp16": (1, ["--zero-stage", "1", "--fp16"]),
    "tensor": (2, ["--tensor-model-parallel-size", "2", "--zero-stage", "0"]),
    "pipeline": (2, ["--pipeline-model-parallel-size", "2", "--zero-stage", "1"]),
    "four": (4, ["--tensor-model-parallel-size", "2", "--zero-stage", "1", "--async-save"]),
}


def text(output):
    return output.read_text(errors="replace") if output.exists() else ""


def trainers(guardians):
    """The trainer of each guardian; None where it has just ended."""
    found = []
    for guardian in guardians:
        try:
            children = psutil.Process(guardian).children()
        except psutil.NoSuchProcess:
            children = []
        found.append(children[0].pid if children else None)
    return found


def steps(output):
    return [int(step) for step in re.findall(r"iteration +(\d+)/", text(output))]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launched(launcher, *flags):
    """A launcher with two processes, in a new group of processes."""
    port = free_port()
    words = {
        "torchrun": ["torchrun", "--nproc_per_node=2", "--master_port", port],
        "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", port],
    }
    program, *start = words[launcher]
    command = [str(BIN / program), *start, "pretrain_gpt.py", *map(str, flags)]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "compat")])
    return command, kept | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": path}


def hurt(guardian, number, guardians):
    """A signal to the trainer of a guardian, as soon as it has one."""
    wait(guardians, lambda: trainers([guardian])[0] is not None)
    victim = trainers([guardian])[0]
    if victim is not None:
        os.kill(victim, number)
    return victim


def finish(guardians, output):
    wait(guardians, lambda: False, pause=0.01)
    printed = text(output)
    assert steps(output)[-1:] == [STEPS], printed
    return printed


def weights(save):
    folder = save / f"global_step{STEPS}"
    return {
        (file.name, name): value.tobytes()
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


@pytest.fixture(scope="module")
def unbroken(warm, tmp_path_factory):
    """The final weights of a run that nothing happens to, by its layout."""
    made = {}

    def make(layout):
        if layout not in made:
            size, flags = LAYOUTS[layout]
            folder = tmp_path_factory.mktemp("unbroken")
            argv = [*FLAGS, *flags, "--save", folder / "save"]
            finish(warm.start(argv, size, folder / "output"), folder / "output")
            made[layout] = weights(folder / "save")
            assert made[layout]
        return made[layout]

    return make


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        ("zero 1", 2),
        *(pytest.param(layout, 4, marks=pytest.mark.proof) for layout in LAYOUTS),
    ],
)
def test_killed_ranks_start_again(warm, unbroken, tmp_path, layout, kills):
    chance, (size, flags) = random.Random(layout), LAYOUTS[layout]
    save, output = tmp_path / "save", tmp_path / "output"
    guardians = warm.start([*FLAGS, *flags, "--save", save], size, output)
    numbers = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL]
    for place in range(kills):
        target = (place + 1) * STEPS // (kills + 2)
        wait(guardians, lambda target=target: steps(output)[-1:] > [target], pause=0.01)
        time.sleep(chance.uniform(0, 0.1))
        rank = chance.randrange(size)
        victim = hurt(guardians[rank], numbers[place], guardians)
        wait(guardians, lambda place=place: f"(restart {place + 1})" in text(output), pause=0.01)
        name = numbers[place].name
        assert re.search(rf"rank {rank} \(\S+, process {victim}\) was killed by {name}",
                         text(output))  # fmt: skip
    printed = finish(guardians, output)
    assert len(re.findall(r"restart \d+: continues after", printed)) == kills, printed
    assert "Traceback" not in printed.partition("(restart 1)")[0]
    assert weights(save) == unbroken(layout)


MOMENTS = {
    "start": lambda output, save: True,
    "layout": lambda output, save: "layout:" in text(output),
    "save": lambda output, save: list(save.glob("*.incomplete")),
    "evaluation": lambda output, save: "validation loss" in text(output),
    "load": lambda output, save: "(restart 1)" in text(output),
}


@pytest.mark.proof
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_any_moment(warm, unbroken, tmp_path, moment, rank):
    size, flags = LAYOUTS["zero 1"]
    save, output = tmp_path / "save", tmp_path / "output"
    evaluating = ["--eval-interval", "15", "--eval-iters", "2"] if moment == "evaluation" else []
    guardians = warm.start([*FLAGS, *flags, *evaluating, "--save", save], size, output)
    if moment == "load":
        wait(guardians, lambda: steps(output)[-1:] > [25])
        hurt(guardians[rank], signal.SIGKILL, guardians)
    wait(guardians, lambda: MOMENTS[moment](output, save))
    hurt(guardians[rank], signal.SIGKILL, guardians)
    printed = finish(guardians, output)
    assert "restart 1" in printed
    assert weights(save) == unbroken("zero 1")


@pytest.mark.proof
def test_all_ranks_killed_at_once(warm, unbroken, tmp_path):
    save, output = tmp_path / "save", tmp_path / "output"
    size, flags = LAYOUTS["four"]
    guardians = warm.start([*FLAGS, *flags, "--save", save], size, output)
    wait(guardians, lambda: steps(output)[-1:] > [25])
    for trainer in trainers(guardians):
        os.kill(trainer, signal.SIGKILL)
    finish(guardians, output)
    assert weights(save) == unbroken("four")


@pytest.mark.proof
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_and_replaced(warm, unbroken, tmp_path, rank):
    size, flags = LAYOUTS["zero 1"]
    save, output = tmp_path / "save", tmp_path / "output"
    argv = [*FLAGS, *flags, "--hang-seconds", "10", "--save", save]
    guardians = warm.start(argv, size, output)
    wait(guardians, lambda: steps(output)[-1:] > [25])
    victim = hurt(guardians[rank], signal.SIGSTOP, guardians)
    printed = finish(guardians, output)
    assert f"process {victim}) is stopped (state T" in printed
    assert printed.count("; it was killed, since it had not ended in time") == 1
    assert weights(save) == unbroken("zero 1")


@pytest.mark.proof
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_guardian_leaves_nothing_behind(warm, tmp_path, rank):
    output = tmp_path / "output"
    guardians = warm.start([*FLAGS, "--save", tmp_path / "save"], 2, output)
    wait(guardians, lambda: steps(output)[-1:] > [15])
    everything = [*guardians, *trainers(guardians)]
    os.kill(guardians[rank], signal.SIGKILL)
    wait(everything, lambda: False, pause=0.01)
    assert not alive(everything)
    printed = text(output) + text(Path(f"{output}.1"))
    assert re.search(r"error: .*guardian( of rank 0)? has ended", printed), printed


@pytest.mark.proof
def test_the_ranks_that_are_left_continue(warm, unbroken, tmp_path):
    save, output = tmp_path / "save", tmp_path / "output"
    argv = [*FLAGS, "--zero-stage", "2", "--inprocess-min-world-size", "1", "--save", save]
    guardians = warm.start(argv, 4, output)
    wait(guardians, lambda: steps(output)[-1:] > [25])
    kill(guardians[3:])
    printed = finish(guardians[:3], output)
    assert "with 2 of 4 ranks (restart 1)" in printed
    assert "layout: 2 processes" in printed
    calm, quiet = tmp_path / "calm", tmp_path / "quiet"
    finish(warm.start([*argv[:-1], calm], 4, quiet), quiet)
    assert steps(output)[-1] == steps(quiet)[-1]
    losses = [
        dict(re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", text(one)))
        for one in (output, quiet)
    ]
    for step in map(str, range(30, STEPS + 1)):
        assert float(losses[0][step]) == pytest.approx(float(losses[1][step]), rel=1e-3)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.proof)])
def test_a_second_run_at_the_same_port_is_refused(warm, tmp_path, size):
    output, second, port = tmp_path / "output", tmp_path / "second", free_port()
    argv = [*FLAGS, "--train-iters", "100000", "--save"]
    guardians = warm.start([*argv, tmp_path / "save"], 2, output, MASTER_PORT=port)
    wait(guardians, lambda: steps(output)[-1:] > [15], pause=0.01)
    running = trainers(guardians)
    wait(
        warm.start([*argv, tmp_path / "other"], size, second, MASTER_PORT=port),
        lambda: False,
        pause=0.01,
    )
    assert [status_of(second, rank) for rank in range(size)] == [2] * size
    for rank in range(1, size):
        said = text(output_of(second, rank))
        assert f"error: rank {rank}: 127.0.0.1:{port} is in use by another run" in said
        assert "started with another --save); choose another MASTER_PORT" in said
    before = steps(output)[-1]
    wait(guardians, lambda: steps(output)[-1] > before + 5, pause=0.01)
    assert trainers(guardians) == running
    os.kill(guardians[0], signal.SIGTERM)
    wait(guardians, lambda: False, pause=0.01)
    assert [status_of(output, rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.proof
def test_a_mistake_ends_at_once(warm, tmp_path):
    output = tmp_path / "output"
    wait(warm.start([*FLAGS, "--num-layers", "0"], 2, output), lambda: False)
    assert text(output).count("error:") == 1 and "restart" not in text(output)


@pytest.mark.proof
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all(tmp_path, launcher, number):
    output = tmp_path / "output"
    flags = [*FLAGS, "--train-iters", "100000", "--save", tmp_path / "save"]
    with open(output, "w") as file:
        command, environment = launched(launcher, *flags)
        started = psutil.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    wait([started.pid], lambda: steps(output)[-1:] > [15])
    everything = started.children(recursive=True)
    started.send_signal(number)
    started.wait(60)
    gone, left = psutil.wait_procs(everything, timeout=30)
    for process in left:
        process.kill()
    assert not left
    assert re.search(r"saved checkpoint at iteration \d+", text(output).rpartition("iteration ")[0])
    assert re.search("stopped by (SIGTERM|end of the launcher)", text(output)), text(output)[-3000:]
