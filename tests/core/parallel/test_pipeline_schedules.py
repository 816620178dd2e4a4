"""Orders of forwards and backwards, against the schedules of DeepSpeed and torch."""

from dataclasses import replace

import pytest
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from megatron.config.layouts import Layout, refusal
from megatron.parallel.pipeline_schedules import INPUTS, WEIGHTS, Action, PipelineSchedule

RANKS = (2, 3, 4, 6, 8)
PARTS = (INPUTS, WEIGHTS)
SHAPES = [
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("dualpipev", 2), ("zbh1", 1),
    ("dualpipev_zb", 2),
]  # fmt: skip


def exists(name: str, ranks: int, chunks: int, micro_batches: int) -> bool:
    """Whether a step of training can run so."""
    counts = (micro_batches,)
    layout = Layout(pipeline=ranks, schedule=name, chunks=chunks, micro_batches=counts)
    return refusal(layout) is None


def least(name: str, ranks: int) -> int:
    """The least number of micro batches per step of training."""
    return Layout(pipeline=ranks, schedule=name).fewest_micro_batches


def words(actions: list[Action], stages: tuple[int, ...]) -> str:
    """F, B, I for inputs or W for weights, chunk, micro batch: "F0.0 F1.0 B1.0"."""
    letters = {"": "B", INPUTS: "I", WEIGHTS: "W"}
    return " ".join(
        f"{letters[a.part] if a.backward else 'F'}{stages.index(a.stage)}.{a.micro_batch}"
        for a in actions
    )


def deepspeed_order(schedule, micro_batches: int) -> list[tuple[bool, int, int]]:
    """(backward, chunk, micro batch) of the passes in DeepSpeed's instructions."""
    order, seen = [], {False: 0, True: 0}
    for instructions in schedule.steps():
        for instruction in instructions:
            backward = isinstance(instruction, deepspeed_schedule.BackwardPass)
            if not backward and not isinstance(instruction, deepspeed_schedule.ForwardPass):
                continue
            if hasattr(instruction, "phase"):
                chunk, micro_batch = divmod(instruction.buffer_id, micro_batches)
                assert chunk == instruction.phase
            else:  # buffers are reused, but 1F1B takes the micro batches in order
                chunk, micro_batch = 0, seen[backward]
                seen[backward] += 1
            order.append((backward, chunk, micro_batch))
    return order


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("ranks", RANKS)
def test_against_deepspeed(name, ranks):
    theirs = {
        "1f1b": deepspeed_schedule.TrainSchedule,
        "dualpipev": deepspeed_schedule.DualPipeVSchedule,
    }[name]
    chunks = 1 if name == "1f1b" else 2
    fewest = least(name, ranks)
    for micro_batches in range(fewest, fewest + 2 * ranks + 3):
        ours = PipelineSchedule(name, ranks, chunks, micro_batches)
        for rank in range(ranks):
            stages = ours.stages_of(rank)
            order = [(a.backward, stages.index(a.stage), a.micro_batch) for a in ours.actions(rank)]
            assert order == deepspeed_order(theirs(micro_batches, ranks, rank), micro_batches)


def torch_interleaved_order(ranks: int, chunks: int, micro_batches: int, rank: int) -> list[Action]:
    """The order of torch's schedule, made without its stages, which hold modules."""
    theirs = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages = ranks, chunks
    theirs._n_microbatches, theirs.microbatches_per_round = micro_batches, ranks
    operations = [op for op in theirs._calculate_single_rank_operations(rank) if op is not None]
    return [
        Action(op.computation_type.name == "FULL_BACKWARD", op.stage_index, op.microbatch_index)
        for op in operations
    ]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", RANKS)
def test_against_torch_interleaved(ranks, chunks):
    # With as many micro batches as ranks torch alternates where the paper's code does not.
    for micro_batches in (2 * ranks, 3 * ranks, 5 * ranks):
        ours = PipelineSchedule("interleaved", ranks, chunks, micro_batches)
        for rank in range(ranks):
            theirs = torch_interleaved_order(ranks, chunks, micro_batches, rank)
            assert ours.actions(rank) == theirs


def test_interleaved_spelled_out():
    schedule = PipelineSchedule("interleaved", 2, 2, 4)
    assert words(schedule.actions(0), (0, 2)) == (
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3"
    )
    assert words(schedule.actions(1), (1, 3)) == (
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3"
    )
    # As many micro batches as ranks: all forwards first.
    assert words(PipelineSchedule("interleaved", 2, 2, 2).actions(1), (1, 3)) == (
        "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"
    )


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", RANKS)
def test_interleaved_warm_up(ranks, chunks):
    for groups in (1, 2, 3):
        schedule = PipelineSchedule("interleaved", ranks, chunks, groups * ranks)
        for rank in range(ranks):
            directions = [action.backward for action in schedule.actions(rank)]
            warm_up = (ranks - rank - 1) * 2 + (chunks - 1) * ranks
            if groups == 1:
                assert directions == [False] * ranks * chunks + [True] * ranks * chunks
                continue
            left = schedule.stages // ranks * schedule.micro_batches - warm_up
            assert directions == [False] * warm_up + [False, True] * left + [True] * warm_up


@pytest.mark.parametrize("name, chunks", SHAPES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_action_once_on_its_rank(name, chunks, forward_only):
    for ranks in RANKS:
        for micro_batches in (1, 2, 5, ranks, 2 * ranks, 3 * ranks):
            if not forward_only and not exists(name, ranks, chunks, micro_batches):
                continue
            schedule = PipelineSchedule(name, ranks, chunks, micro_batches, forward_only)
            held = [schedule.stages_of(rank) for rank in range(ranks)]
            assert sorted(s for stages in held for s in stages) == list(range(ranks * chunks))
            for rank, stages in enumerate(held):
                assert {schedule.rank_of(stage) for stage in stages} == {rank}
                assert len(stages) == chunks
                actions = schedule.actions(rank)
                assert len(actions) == len(set(actions))
                parts = [[replace(a, part="") for a in actions if a.part == part] for part in PARTS]
                assert sorted(parts[0], key=str) == sorted(parts[1], key=str)
                assert {a.result for a in actions if a.part != WEIGHTS} == {
                    Action(backward, stage, micro_batch)
                    for backward in ([False] if forward_only else [False, True])
                    for stage in stages
                    for micro_batch in range(micro_batches)
                }


def test_zbh1_spelled_out():
    """The order of Megatron-DeepSpeed's exact semantics, of which rank 0 has 1F1B's."""
    schedule = PipelineSchedule("zbh1", 3, 1, 4)
    plain = PipelineSchedule("1f1b", 3, 1, 4)
    assert schedule.actions(0) == plain.actions(0)
    assert words(schedule.actions(1), (1,)) == (
        "F0.0 F0.1 I0.0 F0.2 I0.1 W0.0 F0.3 I0.2 W0.1 I0.3 W0.2 W0.3"
    )
    assert words(schedule.actions(2), (2,)) == (
        "F0.0 I0.0 F0.1 I0.1 F0.2 I0.2 W0.0 F0.3 I0.3 W0.1 W0.2 W0.3"
    )


def test_dualpipev_zb_spelled_out():
    """The calls of DeepSeek's dualpipev.py on two ranks, with ``_weight_chunk`` as W."""
    schedule = PipelineSchedule("dualpipev_zb", 2, 2, 4)
    assert words(schedule.actions(0), (0, 3)) == (
        "F0.0 F0.1 F0.2 F1.0 I1.0 W1.0 F1.1 F0.3 B1.1 F1.2 B0.0 B1.2 F1.3 B0.1 B1.3 I0.2 W0.2 I0.3 "
        "W0.3"
    )
    assert words(schedule.actions(1), (1, 2)) == (
        "F0.0 F1.0 F0.1 F1.1 F0.2 B1.0 F1.2 B0.0 F0.3 B1.1 F1.3 B0.1 B1.2 B0.2 I1.3 I0.3 W1.3 W0.3"
    )


@pytest.mark.parametrize("name, base", [("zbh1", "1f1b"), ("dualpipev_zb", "dualpipev")])
@pytest.mark.parametrize("ranks", RANKS)
def test_weights_are_summed_in_the_order_of_whole_backward_passes(name, base, ranks):
    """So that the sums are the same bit by bit."""
    chunks = 1 if name == "zbh1" else 2
    for micro_batches in (2 * ranks, 2 * ranks + 3, 5 * ranks):
        later = PipelineSchedule(name, ranks, chunks, micro_batches)
        plain = PipelineSchedule(base, ranks, chunks, micro_batches)
        for rank in range(ranks):
            for stage in later.stages_of(rank):
                sums = [a for a in later.actions(rank) if a.backward and a.part != INPUTS]
                whole = [a for a in plain.actions(rank) if a.backward and a.stage == stage]
                assert [replace(a, part="") for a in sums if a.stage == stage] == whole


def test_where_the_stages_are():
    assert PipelineSchedule("1f1b", 3, 1, 1).stages_of(2) == (2,)
    assert PipelineSchedule("interleaved", 3, 3, 3).stages_of(1) == (1, 4, 7)
    v = PipelineSchedule("dualpipev", 3, 2, 6)
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize(
    "name, ranks, chunks, micro_batches, reason",
    [
        ("interleaved", 4, 2, 6, "6 micro batches per step"),
        ("interleaved", 4, 1, 4, "there is nothing to interleave"),
        ("dualpipev", 4, 2, 7, "7 micro batches per step"),
        ("dualpipev", 4, 3, 8, "each process has exactly 2 stages"),
        ("1f1b", 4, 2, 8, "this schedule has one stage per process"),
        ("1f1b", 4, 1, 0, "0 micro batches"),
        ("1f1b", 0, 1, 1, "0 processes"),
        ("gpipe", 4, 1, 1, "unknown schedule 'gpipe'; choose one of 1f1b, interleaved"),
    ],
)
def test_what_does_not_exist_is_refused(name, ranks, chunks, micro_batches, reason):
    """Combinations by the table of layouts, with its reasons."""
    with pytest.raises(ValueError, match=reason):
        PipelineSchedule(name, ranks, chunks, micro_batches)


@pytest.mark.parametrize("name, chunks", SHAPES)
def test_evaluation_takes_any_number_of_micro_batches(name, chunks):
    for micro_batches in (1, 3, 5):
        assert PipelineSchedule(name, 4, chunks, micro_batches, True).actions(0)
    with pytest.raises(ValueError, match="0 micro batches"):
        PipelineSchedule(name, 4, chunks, 0, True)
    if chunks == 2:
        with pytest.raises(ValueError, match="--num-virtual-stages-per-pipeline-rank 1"):
            PipelineSchedule(name, 4, 1, 8, True)
