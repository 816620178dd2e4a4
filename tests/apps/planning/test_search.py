"""Which layouts are tried, in which order they come, and that the trainer takes them."""

import dataclasses

import pytest

from megatron.apps.planning.activations import activation_bytes
from megatron.apps.planning.memory import peak_memory, rank_memory
from megatron.apps.planning.parameters import RankShare, linear_parameters, rank_shares
from megatron.apps.planning.search import (
    Workload,
    divides_model,
    estimate,
    fewest_gpus,
    fitting,
    heaviest,
    layouts,
    schedules,
    search,
)
from megatron.apps.planning.step_time import Hardware
from megatron.config import FLAG_CLASSES, FlagParser, ParallelConfig, resolve
from megatron.config.engine import FastPathsConfig
from megatron.config.layouts import Layout, refusal
from megatron.families import BlockLengths, build_model

MACHINES = Hardware(8)
SHAPE = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --lr 1 "


@pytest.fixture
def work(small) -> Workload:
    return Workload(small(), 61, 32)


def test_every_layout_exists_once(work):
    actual = list(layouts(work, MACHINES))
    assert len(actual) == len(set(actual))
    for layout, micro_batch in actual:
        assert refusal(layout) is None
        assert layout.processes == 8
        assert layout.micro_batches == (32 // layout.data // micro_batch,)
        assert micro_batch * layout.data * layout.micro_batches[0] == 32
    kinds = {(layout.schedule, layout.zero) for layout, _ in actual}
    assert kinds == {
        *(("1f1b", zero) for zero in range(4)),
        *((schedule, zero) for schedule in ("interleaved", "dualpipev") for zero in (0, 1, 2)),
    }
    assert {layout.tensor for layout, _ in actual} == {1, 2, 4}  # 4 heads
    assert {layout.recompute for layout, _ in actual} == {None, "selective", "uniform"}
    assert all(layout.tensor > 1 for layout, _ in actual if layout.sequence)
    assert all(layout.pipeline == 1 for layout, _ in actual if layout.zero > 2)


def test_the_trainer_takes_every_layout(work):
    """Flags of every twelfth resolve to the same layout, which the trainer's own table accepts."""
    parser = FlagParser(*FLAG_CLASSES)
    for plan in search(work, MACHINES)[::12]:
        argv = [*SHAPE.split(), "--seq-length", "128", "--train-iters", "1", *plan.flags]
        config = resolve(parser.settings(argv), 8).config
        assert config.layout() == plan.layout
        assert config.training.micro_batch_size == plan.micro_batch


def test_micro_batch_size_is_kept(work):
    asked = dataclasses.replace(work, micro_batch_size=3, global_batch_size=48)
    assert {size for _, size in layouts(asked, MACHINES)} == {3}


def test_tensor_parallelism_stays_in_a_node(work):
    machines = dataclasses.replace(MACHINES, gpus_per_node=2)
    assert {layout.tensor for layout, _ in layouts(work, machines)} == {1, 2}


@pytest.mark.parametrize("heads, groups, tensor, divides", [
    (8, 8, 4, True), (8, 2, 4, True), (8, 1, 8, True), (12, 3, 2, False), (6, 6, 4, False),
])  # fmt: skip
def test_heads_divide(small, heads, groups, tensor, divides):
    model = small(num_attention_heads=heads, num_query_groups=groups)
    assert divides_model(model, tensor) == divides


def test_schedules_of_a_pipeline():
    assert schedules(4, 1) == [("1f1b", 1)]
    assert schedules(4, 2) == [("1f1b", 1), ("interleaved", 2), ("dualpipev", 2)]
    assert schedules(4, 4) == [("1f1b", 1)]
    assert schedules(4, 8) == []
    assert schedules(7, 3) == [("1f1b", 1), ("dualpipev", 2)]
    later = [("zbh1", 1), ("dualpipev_zb", 2)]
    assert schedules(7, 3, eager=True) == [("1f1b", 1), ("dualpipev", 2), *later]


def test_best_first(work):
    plans = search(work, MACHINES)
    times = [plan.time.total for plan in plans]
    assert times == sorted(times)


@pytest.mark.parametrize("layers", [4, 7, 13])
def test_ranks_that_need_less_are_left_out(small, layers):
    """The rank that needs most is among those that are estimated."""
    work = Workload(small(num_layers=layers), 61, 64, micro_batch_size=1)
    for layout, micro_batch in layouts(work, MACHINES):
        model = work.padded(layout.tensor)
        whole = peak_memory(model, layout, micro_batch, layout.micro_batches[0])
        assert estimate(work, layout, micro_batch, MACHINES).memory.total == whole.total
        assert len(rank_shares(model, layout)) == layout.pipeline


def test_blocks_that_stay_in_bf16_are_counted_where_they_are(small):
    """The first block on the first rank, the last two on the last, none of them in 8 bits."""
    paths = FastPathsConfig(
        fp8_format="hybrid", first_last_layers_bf16=True, num_layers_at_end_in_bf16=2
    )
    model = small("llama", num_layers=8)
    work = Workload(model, 61, 64, micro_batch_size=1, fast_paths=paths)
    assert work.float8 == range(1, 6)
    for layout, micro_batch in layouts(work, MACHINES):
        assert layout.float8
        padded, count = work.padded(layout.tensor), layout.micro_batches[0]
        whole = peak_memory(padded, layout, micro_batch, count, work.float8)
        assert estimate(work, layout, micro_batch, MACHINES).memory.total == whole.total
        shares = rank_shares(padded, layout, float8=work.float8)
        assert sum(sum(share.float8) for share in shares) == 5
    two = Layout(pipeline=2, zero=1, precision="bf16", float8=True)
    first, last = rank_shares(model, two, float8=work.float8)
    assert (first.float8, last.float8) == ((3,), (2,))
    weights = [rank_memory(model, two, 1, 2, share).weights for share in (first, last)]
    plain = dataclasses.replace(two, float8=False)
    without = [
        rank_memory(model, plain, 1, 2, share).weights for share in rank_shares(model, plain)
    ]
    each = linear_parameters(model, 1)  # one layout, a byte each
    assert [a - b for a, b in zip(weights, without, strict=True)] == [3 * each, 2 * each]
    all_blocks = [rank_memory(model, two, 1, 2, share) for share in rank_shares(model, two)]
    kept = activation_bytes(model, two, 1)
    for share, whole, flying in zip((first, last), all_blocks, (2, 1), strict=True):
        more = rank_memory(model, two, 1, 2, share).activations - whole.activations
        assert more == pytest.approx(-flying * (4 - share.float8[0]) * kept.float8) and more > 0


def test_ranks_have_widths_for_8_bit_products(small):
    """Shares of a layer that are no multiples of 16, which training refuses, are left out."""
    paths = FastPathsConfig(fp8_format="hybrid")
    work = Workload(small("llama"), 61, 64, micro_batch_size=1)
    for actual, cuts in ((work, {1, 2, 4}), (dataclasses.replace(work, fast_paths=paths), {1, 2})):
        assert {layout.tensor for layout, _ in layouts(actual, MACHINES)} == cuts


def stages(*blocks: int) -> tuple[tuple[BlockLengths, ...], ...]:
    return tuple((BlockLengths(8),) * count for count in blocks)


def test_a_rank_with_a_larger_stage_is_estimated():
    even, uneven = (RankShare(rank, 9, stages(*blocks), False, False, (0, 0)) for rank, blocks in
                    ((0, (2, 2)), (1, (1, 3))))  # fmt: skip
    light = RankShare(2, 8, stages(1, 2), False, False, (0, 0))
    assert heaviest((even, uneven, light)) == [even, uneven]


def test_fitting_is_about_memory_alone(work):
    plans = search(work, MACHINES)
    assert fitting(plans, MACHINES) == plans
    half = sorted(plan.memory.total for plan in plans)[len(plans) // 2]
    little = dataclasses.replace(MACHINES, gpu_memory=f"{half / 2**20}MiB", memory_reserve="0MiB")
    fit = fitting(plans, little)
    assert 0 < len(fit) < len(plans)
    assert all(plan.memory.total <= half + 1 for plan in fit)


def test_more_gpus_are_fewest(work):
    lean = min(plan.memory.total for plan in search(work, MACHINES))
    twice = dataclasses.replace(MACHINES, gpus=16)
    leaner = min(plan.memory.total for plan in search(work, twice))
    assert leaner < lean
    between = f"{(lean + leaner) / 2**21}MiB"
    machines = dataclasses.replace(MACHINES, gpu_memory=between, memory_reserve="0MiB")
    assert fewest_gpus(work, machines) == 16
    tiny = dataclasses.replace(MACHINES, gpu_memory="0.01MiB", memory_reserve="0MiB")
    assert fewest_gpus(work, tiny, limit=4) is None


def test_a_teacher_has_weights_and_a_forward_pass(small):
    """As many as its model has, and a third of the FLOPs of its training."""
    teacher = small(num_layers=6, hidden_size=96, ffn_hidden_size=160).with_vocabulary(61)
    alone = Workload(small(), 61, 32)
    taught = dataclasses.replace(alone, teacher=teacher)

    def more(layout: Layout) -> tuple[float, float]:
        layout = dataclasses.replace(layout, micro_batches=(2,))
        one, other = (estimate(work, layout, 1, MACHINES) for work in (alone, taught))
        return other.memory.weights - one.memory.weights, other.time.compute / one.time.compute

    weights, slower = more(Layout(data=2, zero=1, precision="bf16"))
    whole = sum(p.numel() for p in build_model(teacher, ParallelConfig()).parameters())
    assert weights == 2 * whole
    training = Workload(teacher, 61, 32).flops()
    assert slower == pytest.approx(1 + training / 3 / alone.flops())
    assert more(Layout(data=2, zero=3, precision="bf16"))[0] == whole
    halves, _ = more(Layout(pipeline=2, precision="bf16"))
    assert whole < halves < 1.5 * whole
    taught = dataclasses.replace(alone, teacher=small(num_layers=3).with_vocabulary(61))
    assert more(Layout(pipeline=4, precision="bf16"))[0] == float("inf")
