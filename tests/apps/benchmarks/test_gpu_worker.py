"""What a worker of benchmarks/gpu.py does with a cell."""

import dataclasses
import json
import subprocess
import sys
import types
import weakref
from pathlib import Path

import gpu
import pytest
import torch
from contestants import drawn, registry
from contestants.hf import parameter_groups
from contestants.inputs import batches
from contestants.plain import build
from contestants.process import ALLOCATOR, environment
from contestants.registry import Contestant, NoMoreSteps
from gpu_suite import device, ranks, stepping, training, worker
from gpu_suite.graphs import graph_counts
from gpu_suite.ladder import MAIN, Cell
from gpu_suite.processes import Sampler
from gpu_suite.results import read_bundle
from gpu_suite.shapes import SHAPES, Steps
from gpu_suite.stepping import Stepping
from gpu_suite.training import Room, train
from graph_counts import graphs_alone

from megatron.families import build_model
from megatron.model.layer_list import initialise
from megatron.parallel.shard import shard_of
from megatron.run.run import parse_run

CPU = torch.device("cpu")
SETTING = SHAPES["tiny"].setting()


def contestant_of(monkeypatch, run) -> Cell:
    """A cell whose contestant trains by this function."""
    monkeypatch.setitem(sys.modules, "contestants.made_up", types.SimpleNamespace(run=run))
    monkeypatch.setitem(registry.CONTESTANTS, "made-up", Contestant("made_up", "none"))
    return Cell(MAIN, "tiny", "x", "made-up")


class Model:
    """Stands for what takes the memory."""

    itself: object


@pytest.mark.parametrize(
    "kind",
    [torch.OutOfMemoryError, pytest.param(RuntimeError, marks=pytest.mark.proof)],
)
def test_out_of_memory_is_tried_again_with_half_the_micro_batch(monkeypatch, tmp_path, kind):
    """Once, when nothing of the first try is left; a third time is not worth it."""
    tried, models = [], []

    def run(entrant, setting, after_step):
        assert all(model() is None for model in models)
        model = Model()
        model.itself = model  # as engines have hooks that refer to them
        models.append(weakref.ref(model))
        tried.append((setting.micro_batch, setting.micro_batches))
        if len(tried) == 1 or always:
            raise kind("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")
        while True:
            after_step(torch.tensor(6.0))

    always = False
    cell = contestant_of(monkeypatch, run)
    found = train(cell, tmp_path / "trace", {}, Room(None))
    assert tried == [(4, 2), (2, 4)]
    assert found["halved"] == "CUDA out of memory. Tried to allocate 2 GiB"
    assert found["setting"]["micro_batch"] == 2 and found["losses"] == [6.0] * 6
    assert len(found["rounds"]) == 2 and "failed" not in found
    always, tried[:], models[:] = True, [], []
    found = train(cell, tmp_path / "trace", {}, Room(None))
    assert len(tried) == 2 and found["failed"].startswith("out of memory: CUDA out of memory")


def test_other_errors_end_the_cell_and_its_process(monkeypatch, tmp_path, capsys):
    def run(entrant, setting, after_step):
        raise RuntimeError("CUDA error: an illegal memory access")

    cell = contestant_of(monkeypatch, run)
    request = json.loads(worker.request_of(cell, tmp_path / "trace", {}))
    found = worker.answer(request)
    assert found["failed"] == "RuntimeError: CUDA error: an illegal memory access"
    assert found["restart"] and found["left_bytes"] == 0
    assert "Traceback" in capsys.readouterr().err
    flag = dataclasses.replace(cell, contestant="ours-zero1+no-such-flag=1")
    found = worker.answer(json.loads(worker.request_of(flag, tmp_path / "trace", {})))
    assert "unknown flag --no-such-flag" in found["failed"] and "restart" not in found
    missing = Contestant("made_up", "none", needs=("json", "no_such"))
    monkeypatch.setitem(registry.CONTESTANTS, "made-up", missing)
    assert worker.answer(request)["missing"] == "no_such not installed"


def test_what_cannot_fit_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_measure", lambda *args: pytest.fail("started"))
    cell = Cell(MAIN, "Qwen2.5-7B", "bf16", "ours-zero1")
    found = train(cell, tmp_path / "trace", {}, Room(85_000_000_000))
    assert "not started" in found["cannot_fit"] and found["predicted_bytes"] > 85e9
    assert found["command"].startswith("pretrain_gpt.py --num-layers 28 --hidden-size 3584 ")


def test_steps_are_warmed_up_timed_and_traced(monkeypatch, tmp_path):
    """Warm-up and traced steps are in no round; all of them are compared."""
    clocks = []

    class Clock:
        def __init__(self):
            clocks.append(steps.done)

        def stop(self):
            return {"from": clocks[-1], "to": steps.done}

    monkeypatch.setattr(stepping, "Clock", Clock)
    trace = tmp_path / "new" / "trace.json.gz"
    steps = Stepping(Steps(2, 2, 3), trace, {"matmul_peak_flops": 1e12})
    with pytest.raises(NoMoreSteps):
        while True:
            with torch.profiler.record_function("megatron::forward"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            steps.after_step(torch.tensor(1.0), torch.tensor(2.0))
    assert steps.rounds == [{"from": 2, "to": 5}, {"from": 5, "to": 8}]
    assert steps.done == 10 and steps.losses == [1.0] * 10 and steps.grad_norms == [2.0] * 10
    found = stepping.split(trace)
    assert found["steps"] == 2 and "2 steps of rank 0" in found["table"]
    assert found["matmul_peak_flops"] == 1e12
    assert found["products"][0][0] == "8 x 8 x 8"


def test_drawn_weights_are_the_trainers_on_a_cpu():
    """Canonical names decide; the peers get the same under their own names."""
    run = parse_run(None, drawn_flags())
    params = dict(build_model(run.config.model).canonical_parameters())
    for name, param in params.items():
        whole = drawn.draw(name, param, 1234, CPU)
        initialise(name, param, 1234)
        assert torch.equal(shard_of(param).cut(whole), param), name
    theirs = drawn.huggingface_weights(SETTING, CPU)
    first = params["layers.0.mlp.down.weight"]
    assert torch.equal(theirs["model.layers.0.mlp.down_proj.weight"], first)
    plain = build(SETTING, CPU)
    groups = parameter_groups(plain)
    count = sum(param.numel() for group in groups for param in group["params"])
    assert count == sum(param.numel() for param in params.values())
    assert torch.equal(plain.blocks[0].down.weight, first.bfloat16())


def test_drawn_samples_are_the_trainers():
    from megatron.run.run import run_data

    train = run_data(parse_run(None, drawn_flags()))[0].train
    data = batches(SETTING, CPU)
    for at in (0, SETTING.micro_batch):
        tokens, labels = next(data)
        for row in range(SETTING.micro_batch):
            sample = torch.from_numpy(train[at + row])
            assert torch.equal(tokens[row], sample[:-1]) and torch.equal(labels[row], sample[1:])


def drawn_flags() -> list[str]:
    from contestants.flags import flags_of

    return flags_of(SETTING, 0)


@pytest.mark.proof
def test_nothing_of_a_training_is_left():
    """Neither of one that ends nor of one that runs out of memory after a step."""
    code = (
        "import gc, json, sys, torch; sys.path[:0] = [sys.argv[1]]\n"
        "from gpu_suite import stepping, worker\n"
        "from gpu_suite.ladder import MAIN, Cell\n"
        "from megatron.model.layer_list import LayerStack\n"
        "from pathlib import Path\n"
        "request = worker.request_of(Cell(MAIN, 'tiny', 'x', 'ours-zero1'), Path('x'), {})\n"
        "whole = stepping.Stepping.after_step\n"
        "def short(self, *loss):\n"
        "    whole(self, *loss)\n"
        "    raise torch.OutOfMemoryError('no memory')\n"
        "for stepping.Stepping.after_step in (whole, short):\n"
        "    found = worker.answer(json.loads(request))\n"
        "    left = [each for each in gc.get_objects() if isinstance(each, LayerStack)]\n"
        "    print('left', len(left), found.get('failed'), found.get('halved'))\n"
    )
    folder = str(Path(gpu.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("left")]
    assert said == ["left 0 None None", "left 0 out of memory: no memory no memory"]


@pytest.mark.proof
def test_a_trial_that_is_killed_resumed_and_merged(tmp_path, capsys):
    """The whole of --scale tiny, as it is started; the first run is killed in the middle."""
    bundle, program = tmp_path / "gpu.tgz", str(Path(gpu.__file__))
    command = [sys.executable, program, "--scale", "tiny", "--bundle", str(bundle)]
    command += ["--groups", "machine,main,ablations,peers,lengths,families"]
    first = subprocess.Popen(
        [*command, "--results", str(tmp_path / "a")], stderr=subprocess.PIPE, text=True
    )
    for line in first.stderr:
        if line.startswith("main-tiny-fp8"):
            break
    first.kill()
    first.wait()
    done = read_bundle(bundle)
    assert set(done) == {"main-tiny-bf16"}
    again = subprocess.run(
        [*command, "--results", str(tmp_path / "b")], capture_output=True, text=True, check=True
    )
    assert "main-tiny-bf16" not in again.stderr and "main-tiny-fp8: about" in again.stderr
    assert gpu.main(["--merge", str(bundle)]) == 0
    table = capsys.readouterr().out
    assert read_bundle(bundle)["main-tiny-bf16"] == done["main-tiny-bf16"]
    rows = {
        line.split(" | ")[2]: line for line in table.splitlines() if line.startswith("| tiny |")
    }
    for variant in ("bf16", "fp8", "all of it", "attention eager", "plain PyTorch"):
        assert "| 6.24" in rows[variant], rows  # a loss of log(512), so that it was measured
    assert "unknown flag" in rows["a flag of another version"]
    for shape, loss in (("bert", "6.9"), ("t5", "6.2"), ("retro", "6.2")):
        assert f"pretrain_{shape}.py --num-layers " in table
        (row,) = (line for line in table.splitlines() if line.startswith(f"| tiny-{shape} "))
        assert f"| {loss}" in row  # log(512), and log(2) of BERT's second head
    assert "2 steps of rank 0" in table and "pretrain_gpt.py --num-layers 2" in table


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_every_contestant_has_the_trainers_allocator(monkeypatch, given, seen):
    """The ceilings allocate before the trainer could set it."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert environment(SETTING, tuned_malloc=False).get("PYTORCH_ALLOC_CONF") == seen


def test_graphs_are_counted(monkeypatch):
    """A block's and, on a GPU, others; a break is a failure."""
    with graphs_alone():
        found = graph_counts(SETTING, {"bf16": "ours-zero1+torch-compile"})
        assert found == {"rows": [["bf16", 1, []]]}
        broken = lambda *_: (3, ["because"])  # noqa: E731
        monkeypatch.setattr("gpu_suite.graphs.counted", broken)
        assert graph_counts(SETTING, {"fp8": ""})["failed"] == "fp8: because"


def test_losses_of_ranks_are_those_of_one():
    """Each layout that fails or differs is named."""
    said = {name: [6.5, 6.25] for name in ranks.LAYOUTS}
    assert "failed" not in ranks.compared(said)
    said |= {"tp2": [6.5, 6.25 * 1.02], "dp2, ZeRO 2": "refused", "tp2-sp": [6.5, float("nan")]}
    del said["dp2, ZeRO 3"]
    found = ranks.compared(said)
    assert found["failed"] == "not as one rank: tp2; tp2-sp; dp2, ZeRO 2; dp2, ZeRO 3"
    rows = {name: rest for name, *rest in found["rows"]}
    assert rows["dp2, ZeRO 2"] == ["refused", None] and rows["tp2"][1] == pytest.approx(0.02)


@pytest.mark.proof
def test_ranks_train_together_and_an_error_is_told(monkeypatch):
    """On the CPU; the last layout has a flag that no run has."""
    layouts = {name: ranks.LAYOUTS[name] for name in ("one rank", "tp2-sp", "dp2, ZeRO 2")}
    monkeypatch.setattr(ranks, "LAYOUTS", {**layouts, "wrong": (1, "--no-such-flag")})
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = ranks.on_one_card(300.0)
    rows = {name: rest for name, *rest in found["rows"]}
    assert found["failed"] == "not as one rank: wrong" and "no-such-flag" in rows["wrong"][0]
    assert 0 < rows["tp2-sp"][1] < 1e-2 and len(rows["tp2-sp"][0]) == ranks.STEPS


def test_nvidia_smi_is_asked_about_the_gpu_that_is_measured(monkeypatch):
    asked = []
    said = types.SimpleNamespace(returncode=1, communicate=lambda: ("", ""), terminate=lambda: None)
    for name in ("run", "Popen"):
        monkeypatch.setattr(subprocess, name, lambda command, **_: asked.append(command) or said)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with Sampler():
        device.smi()
    assert len(asked) == 2 and all("--id=3" in command for command in asked)
