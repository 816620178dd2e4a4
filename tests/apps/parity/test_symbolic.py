"""The check on simulated ranks: what it accepts, what it names, and its process groups."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.apps.parity.symbolic.check import check_run
from megatron.apps.parity.symbolic.groups import Fault
from megatron.apps.parity.symbolic.simulate import batches_of
from megatron.apps.parity.symbolic.trace import block_bytes, traced
from megatron.apps.parity.symbolic.world import World
from megatron.engine.update.shared_gradients import SharedGradients
from megatron.parallel.collectives import start_gather_sequence
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.run.run import flag_parser, run_data, run_of

sys.path.insert(0, str(Path(__file__).parents[2] / "planted"))

import cases as small  # noqa: E402
from published_models import cases as published  # noqa: E402

SMALL = [(axis, number) for axis, runs in small.CASES.items() for number in range(len(runs))]
SAMPLE = [("data", 3), ("sequence", 0), ("expert", 1), ("pipeline", 1)]


def _checked(words: str | list[str], ranks: int):
    words = words.split() if isinstance(words, str) else words
    return check_run(flag_parser(None, frozenset()).settings(words), ranks)


@pytest.mark.parametrize(
    ("axis", "number"),
    [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.proof) for case in SMALL],
)
def test_right_layouts_have_no_fault(axis, number):
    ranks, words = small.CASES[axis][number]
    assert small.checked(ranks, words) is None


@pytest.mark.parametrize(
    "precision",
    [
        "--bf16 --use-precision-aware-optimizer --exp-avg-dtype int8 --main-params-dtype bf16",
        "--bf16 --fp32-residual-connection",
        "--fp16 --loss-scale-window 10 --hysteresis 1 --min-loss-scale 2",
    ],
)
def test_any_precision_is_checked(precision):
    """The small model computes in float64, where these flags would be contradictions."""
    assert small.checked(4, f"{small.GPT} {TP} --zero-stage 1 {precision}") is None


@pytest.mark.proof
@pytest.mark.parametrize(
    ("ranks", "words"), [pytest.param(r, w, id=name) for name, r, w in published()]
)
def test_published_models_have_no_fault(ranks, words):
    report = _checked(words, ranks)
    assert report.fault is None
    assert report.seconds < 600 and report.numbers["peak MiB"] < 8192
    if "t5" not in words:  # torch's attention with a bias that learns keeps scores on CPUs
        (kept,) = (value for name, value in report.numbers.items() if name.endswith(" keeps"))
        assert kept == pytest.approx(report.numbers["MiB by plan"], rel=0.02, abs=1)


WIDE = (
    "--hidden-size 256 --ffn-hidden-size 1024 --seq-length 128 --max-position-embeddings 128 "
    "--hidden-dropout 0 --attention-dropout 0 --bf16 --micro-batch-size 1 --global-batch-size 4"
)
TP, CP = "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2"
EXPERTS = f"{small.MOE} --moe-ffn-hidden-size 256 --expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, f"{small.GPT} {TP}"),
        (1, f"{small.GPT} {small.LLAMA} --num-query-groups 2"),
        (2, f"{small.GPT} {small.LLAMA} --num-query-groups 1 --attention-output-gate {TP}"),
        (4, f"{small.GPT} {small.LLAMA} --num-query-groups 1 {TP} {CP}"),
        (2, f"{small.BERT} {CP}"),
        (4, f"{small.GPT} {EXPERTS} {TP}"),
    ],
    ids=["gpt", "llama", "one key head", "one key head, context", "bert", "experts"],
)
def test_a_block_keeps_what_the_planner_counts(ranks, words):
    run = run_of(flag_parser(None, frozenset()).settings(f"{words} {WIDE}".split()), ranks)
    batch = next(batches_of(run_data(run), run.config, Mesh()))
    _, kept, plan = block_bytes(run, traced(run.config, batch, {}, torch.bfloat16))
    assert kept == pytest.approx(plan, rel=0.02)


def test_unsynced_norms_are_named(monkeypatch):
    monkeypatch.setattr(SharedGradients, "sum", lambda self: None)
    fault = small.checked(2, f"{small.GPT} --tensor-model-parallel-size 2 --sequence-parallel")
    assert "gradient of final_norm.norm.bias on rank 0" in fault


def test_a_collective_that_only_some_ranks_call_is_named():
    def program(rank):
        mesh = build_mesh({"tensor": 2})
        if rank != 3:
            dist.all_reduce(torch.ones(3), group=mesh.tensor.handle)

    with pytest.raises(Fault, match="no rank can continue; .*\n.*rank 2 waits in all_reduce"):
        World(4).run(program)


def test_other_sizes_of_one_collective_are_named():
    def program(rank):
        dist.all_reduce(torch.ones(3 + rank), group=build_mesh({"tensor": 2}).tensor.handle)

    with pytest.raises(Fault, match="rank 1: all_reduce .sum. of 4 elements.*rank 0 .* of 3"):
        World(2).run(program)


def test_other_reductions_are_named():
    def program(rank):
        kind = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(3), op=kind, group=build_mesh({"tensor": 2}).tensor.handle)

    with pytest.raises(Fault, match="rank 1: all_reduce .max.*rank 0 .* all_reduce .sum."):
        World(2).run(program)


def test_a_result_is_not_a_number_until_it_is_waited_for():
    def program(rank):
        group = build_mesh({"tensor": 2}).tensor
        finish = start_gather_sequence(torch.full((1, 2, 3), float(rank)), group)
        return finish()

    first, second = World(2).run(program)
    assert first.equal(second) and first[0, :, 0].tolist() == [0, 0, 1, 1]

    def early(rank):
        x = torch.ones(3)
        work = dist.all_reduce(x, group=build_mesh({"tensor": 2}).tensor.handle, async_op=True)
        before = x.clone()
        work.wait()
        return before, x

    for before, after in World(2).run(early):
        assert before.isnan().all() and after.tolist() == [2, 2, 2]


def test_a_call_that_is_never_waited_for_is_named():
    def program(rank):
        group = build_mesh({"tensor": 2}).tensor
        dist.all_reduce(torch.ones(3), group=group.handle, async_op=True)

    with pytest.raises(Fault, match="all_reduce .sum. of 3 elements .* is never waited for"):
        World(2).run(program)


def test_sends_that_wait_for_each_other_are_named():
    def program(rank):
        build_mesh({"pipeline": 2})
        dist.isend(torch.ones(3), 1 - rank)
        dist.irecv(torch.ones(3), 1 - rank)

    with pytest.raises(Fault, match="no rank can continue"):
        World(2).run(program)


def test_functional_collectives_meet_the_others():
    functional = torch.ops._c10d_functional

    def program(rank):
        name = build_mesh({"tensor": 2}).tensor.handle.group_name
        total = functional.all_reduce(torch.full((2,), float(rank + 1)), "sum", name)
        parts = functional.all_gather_into_tensor(torch.full((1,), float(rank)), 2, name)
        share = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 2, name)
        return [functional.wait_tensor(each).tolist() for each in (total, parts, share)]

    first, second = World(2).run(program)
    assert first == [[3, 3], [0, 1], [0, 2]] and second[2] == [4, 6]
