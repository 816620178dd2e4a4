"""Norms of optimizer states, zeros in gradients and TensorBoard's points: the numbers that torch
computes from one process's states, in every layout."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from samples import sampled
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_jobs import TINY, train

from megatron.apps.parity.runs import PlainTraining, watched_trainer
from megatron.engine.environment import deterministic_kernels, distributed
from megatron.engine.train_engine import StepResult
from megatron.features.trackers.tensorboard import state_norms
from megatron.parallel.shard import shard_of
from megatron.run.run import parse_run
from megatron.training.intervals import IntervalMeter
from megatron.training.trainer import Step

STEPS = 3
FLAGS = [
    *TINY,
    *"--global-batch-size 4 --train-iters 3".split(),
    # The gradient of a key's bias is zero but for rounding.
    *"--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --log-interval 2".split(),
    *"--log-params-norm --log-num-zeros-in-grad".split(),
]


def reference(flags: list[str]) -> list[dict[str, float]]:
    """The numbers of each step, from torch's optimizer over whole parameters without padding."""
    training, steps = PlainTraining(flags), []
    for _ in range(STEPS):
        training.step()
        named: dict[str, float] = {}
        states: dict[str, list[torch.Tensor]] = {}
        zeros = 0
        for param in training.params.values():
            rows = shard_of(param).canonical_shape[0]
            state = training._optimizer.state[param]
            momentum = state["exp_avg" if "exp_avg" in state else "momentum_buffer"]
            variance = state.get("exp_avg_sq", torch.zeros_like(param))  # SGD has none
            states.setdefault("weight", []).append(param.detach()[:rows])
            states.setdefault("momentum", []).append(momentum[:rows])
            states.setdefault("variance", []).append(variance[:rows])
            states.setdefault("variance_sqrt", []).append(variance[:rows].sqrt())
            zeros += int((param.grad[:rows] == 0).sum())
        for kind, tensors in states.items():
            flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
            named[f"{kind}_l2"] = float(torch.linalg.vector_norm(flat))
            named[f"{kind}_l1"] = float(flat.abs().sum())
            named[f"{kind}_abs_max"] = float(flat.abs().max())
        steps.append({**named, "zeros": zeros})
    return steps


def measured(flags: list[str]) -> list[dict[str, float]]:
    """The numbers of each step, as the engine measures them; for the pool."""
    run, steps = parse_run(None, flags), []
    with deterministic_kernels(run.config), distributed(run.config.parallel) as mesh:

        def watch(result: Any) -> None:
            norms = state_norms(trainer.engine)
            zeros = float(result.zeros) if result.zeros is not None else -1.0
            steps.append({**{name: float(v) for name, v in norms.items()}, "zeros": zeros})

        trainer = watched_trainer(run, mesh, watch)
        trainer.fit()
    return steps


LOW = "--bf16 --use-precision-aware-optimizer --exp-avg-dtype int8 --exp-avg-sq-dtype int8"
TENSOR, PIPELINE = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"
LORA = f"{UNTIED} --lora --lora-rank 3"
CASES = {
    "zero0-tp2": (2, f"--zero-stage 0 {TENSOR}", UNTIED),
    "zero0-dp2": (2, "--zero-stage 0", UNTIED),
    "zero1-dp2": (2, "--zero-stage 1", UNTIED),
    "zero2-dp2": (2, "--zero-stage 2", UNTIED),
    "zero3-dp2": (2, "--zero-stage 3", UNTIED),
    "zero1-pp2": (2, f"--zero-stage 1 {PIPELINE}", UNTIED),
    "zero1-pp2-tied": (2, f"--zero-stage 1 {PIPELINE}", ""),
    "zero0-pp2-tp2-tied": (4, f"--zero-stage 0 {PIPELINE} {TENSOR}", ""),
    "zero1-tp2-sp-dp2": (4, f"--zero-stage 1 {TENSOR} --sequence-parallel", UNTIED),
    "zero3-tp2-dp2": (4, f"--zero-stage 3 {TENSOR}", UNTIED),
    "zero1-tp2-one-key-head": (2, f"--zero-stage 1 {TENSOR}", "--num-query-groups 1"),
    "zero1-tp2-lora": (2, f"--zero-stage 1 {TENSOR}", LORA),
    "zero3-dp2-dora": (2, "--zero-stage 3", f"{LORA} --use-dora"),
    "zero1-dp2-sgd": (2, "--zero-stage 1", f"{UNTIED} --optimizer sgd"),
    "zero2-dp2-offload": (2, "--zero-stage 2 OFFLOAD", UNTIED),
    "zero3-dp2-offload": (2, "--zero-stage 3 OFFLOAD", UNTIED),
    "zero1-dp2-bf16": (2, "--zero-stage 1 --bf16 --accumulate-allreduce-grads-in-fp32", UNTIED),
    "zero0-dp2-fp16": (2, "--zero-stage 0 --fp16 --initial-loss-scale 1024", UNTIED),
    "zero1-dp2-fp16": (2, "--zero-stage 1 --fp16 --initial-loss-scale 1024", UNTIED),
    "zero2-dp2-int8": (2, f"--zero-stage 2 {LOW}", UNTIED),
}
"""Number of processes, flags of the layout, and flags that the reference has as well."""
SAMPLE = ("zero0-tp2",)
"""Layouts of the normal run; stage 1 is in the test of TensorBoard's points."""


def cells():
    for name in CASES:
        yield pytest.param(name, marks=() if name in SAMPLE else (pytest.mark.proof,))


@pytest.mark.parametrize("case", list(cells()))
def test_numbers_are_those_of_one_process(pool, tmp_path, case):
    processes, layout, model = CASES[case]
    if "OFFLOAD" in layout:
        zero = {"stage": int(layout.split()[1]), "offload_optimizer": {"device": "cpu"}}
        config = tmp_path / "offload.json"
        config.write_text(json.dumps({"zero_optimization": zero}))
        layout = f"--deepspeed --deepspeed_config {config}"
    half = "16" in layout
    flags = [*FLAGS, *model.split()]
    expected = reference(flags)
    ranks = pool.run(processes, measured, [*flags, *layout.split()])
    assert all(steps == ranks[0] for steps in ranks), "every rank has the numbers of all"
    for number, (step, plain) in enumerate(zip(ranks[0], expected, strict=True)):
        zeros, counted = step.pop("zeros"), plain.pop("zeros")
        if not half:  # small gradients become zero in 16 bits
            assert zeros == (counted if number else -1), "the first step has no log line"
        assert step == pytest.approx(plain, rel=3e-2 if half else 1e-5)


@pytest.mark.parametrize("more", sampled(["", "--accumulate-allreduce-grads-in-fp32"], "".__eq__))
def test_zeros_of_fp16_are_those_of_zero_1(pool, more):
    """Gradients that are too small for float16 at this scale; one rank, so bit for bit."""
    flags = [*FLAGS, *f"--fp16 --initial-loss-scale 2 {more} --zero-stage".split()]
    partitioned, whole = (pool.run(1, measured, [*flags, stage])[0] for stage in ("1", "0"))
    zeros = [step["zeros"] for step in whole]
    assert zeros == [step["zeros"] for step in partitioned] and max(zeros) > 0


def test_tensorboard_has_every_step_under_megatron_deepspeeds_tags(pool, tmp_path):
    """Read by its own reader; log lines are further apart."""
    model = [*FLAGS, UNTIED]
    flags = [*model, "--zero-stage", "1", "--tensorboard-dir", str(tmp_path), "--eval-iters", "1"]
    flags += (
        "--log-optimizer-states-to-tensorboard --log-world-size-to-tensorboard "
        "--log-batch-size-to-tensorboard --log-memory-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --timing-log-level 1 "
        "--no-log-learnig-rate-to-tensorboard"
    ).split()
    expected = reference(model)
    record = pool.run(2, train, flags)[0]
    by_step, by_samples, by_tokens = (
        events(folder) for folder in (tmp_path, tmp_path / "vs_samples", tmp_path / "vs_tokens")
    )
    for name in expected[0].keys() - {"zeros"}:
        numbers = [step[name] for step in expected]
        assert by_step[f"optimizer/{name}"] == pytest.approx(numbers, rel=1e-5)
        assert by_tokens[f"optimizer/{name} vs tokens"] == by_step[f"optimizer/{name}"]
        assert f"optimizer/{name} vs samples" not in by_samples
    series = {
        "lm-loss-training/lm loss": record.losses,
        "grad-norm/grad-norm": record.norms,
        "num-zeros/num-zeros": [step["zeros"] for step in expected],
        "params-norm/params-norm": [step["weight_l2"] for step in expected],
        "seqlen/actual_seq_length": [16.0] * STEPS,
        "batch-size/batch-size": [4.0] * STEPS,
        "world-size/world-size": [2.0] * STEPS,
    }
    for tag, numbers in series.items():
        assert by_step[tag] == pytest.approx(numbers, rel=1e-5), tag
        assert by_samples[f"{tag} vs samples"] == by_tokens[f"{tag} vs tokens"] == by_step[tag]
    assert len(by_step["mem-allocated-bytes"]) == STEPS
    loss = by_step["lm-loss-validation/lm loss validation"]
    ppl = by_step["lm-loss-validation/lm loss validation ppl"]
    assert ppl == pytest.approx([math.exp(value) for value in loss], rel=1e-5)
    assert "lm-loss-validation/lm loss test vs tokens" in by_tokens
    assert len(by_step["iteration-time/iteration-time"]) == 2, "of log lines"
    parts = [by_step["forward-backward-time"], by_step["optimizer-time"]]
    assert [len(part) for part in parts] == [STEPS] * 2 and min(map(min, parts)) > 0
    assert not {tag for tag in by_step if tag.startswith(("learning-rate", "loss-scale/"))}


def events(folder: Path) -> dict[str, list[float]]:
    reader = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0})
    reader.Reload()
    named = {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}
    return {tag: [event.value for event in events] for tag, events in named.items()}


def recorded() -> dict[str, Any]:
    """Numbers that ranks record of two steps; for the pool."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    meter = IntervalMeter(9, torch.device("cpu"), dist.get_world_size(), None)
    loss = torch.tensor(1.0)
    for extra in (0.0, 2.0):
        meter.add(
            Step(StepResult(loss, {"lm loss": loss}, 1.0, False, 1.0), 1, 0, 4, 8, 0.1, 0.1), 1
        )
        for reduce in ("mean", "sum", "max"):
            meter.record(f"a {reduce}", torch.tensor(rank + extra), reduce, over_ranks=True)
    row = meter.finish(iteration=2, consumed_samples=8, consumed_tokens=64).row()
    return {name: value for name, value in row.items() if name.startswith("a ")}


def test_recorded_numbers_are_reduced_over_steps_and_ranks(pool):
    assert pool.run(2, recorded) == [{"a mean": 1.5, "a sum": 6.0, "a max": 3.0}] * 2
