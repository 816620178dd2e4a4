"""The table of layouts: what it claims is what the configuration does."""

import dataclasses
import itertools

import pytest
from samples import sampled

from megatron.apps.parity.layouts import flags_for, parse_layout, short_name
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.config.layouts import (
    PRECISIONS,
    RECOMPUTE,
    RULES,
    SCHEDULES,
    Layout,
    StateDtypes,
    complete_schedule,
    refusal,
)
from megatron.engine.deepspeed_json import complete, merge

MODEL = (
    "--num-layers 48 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3 --deepspeed_config ds.json"
).split()
PARSER = FlagParser(*FLAG_CLASSES)


def asked(layout, extra=()):
    """What a run with the layout's flags and JSON resolves to: its layout, or why it is refused."""
    devices = {key: getattr(layout, key) for key in ("offload_optimizer", "offload_param")}
    content = {
        "zero_optimization": {
            key: {"device": d, "nvme_path": "/nvme"} for key, d in devices.items() if d
        }
    }
    words = [*MODEL, *flags_for(layout), *extra]
    if layout.micro_batches:
        each = 2 * layout.data
        words += ["--global-batch-size", str(max(layout.micro_batches) * each)]
        if len(layout.micro_batches) > 1:
            first, second, *_ = layout.micro_batches
            words += ["--rampup-batch-size", *map(str, (first * each, (second - first) * each, 64))]
    else:
        words += ["--skip-train"]
    settings = merge(PARSER.settings(words), content, "ds.json", layout.processes)
    try:
        config = resolve(settings, layout.processes).config.with_vocabulary(100)
        complete(content, config)
    except ConfigError as error:
        return str(error)
    return config.layout(content)


def cells():
    """Layouts of every kind, those that make no sense included."""
    for tensor, sequence, pipeline, schedule, chunks in itertools.product(
        (1, 2), (False, True), (1, 2), SCHEDULES, (1, 2, 3)
    ):
        for zero, precision, offload in itertools.product(
            range(4),
            PRECISIONS,
            ((None, None), ("cpu", None), (None, "cpu"), ("cpu", "nvme"), ("nvme", None)),
        ):
            yield Layout(
                tensor, sequence, pipeline, schedule, chunks, 1 + zero % 2, zero, precision,
                offload_optimizer=offload[0], offload_param=offload[1],
            )  # fmt: skip


def stored_states():
    """Layouts of --use-precision-aware-optimizer, those that are refused included."""
    for zero, precision, in_fp32, offload, pipeline in itertools.product(
        range(4), PRECISIONS, (False, True), (None, "cpu"), (1, 2)
    ):
        yield Layout(
            pipeline=pipeline, zero=zero, precision=precision, grads_in_fp32=in_fp32,
            states=StateDtypes("bf16", exp_avg_sq="int8"), offload_optimizer=offload,
        )  # fmt: skip


def claim(layout):
    """What the table makes of a layout: itself, or the message of the rule that refuses it."""
    rule = refusal(layout)
    return layout if rule is None else rule.message(layout)


CELLS = [(1, False), (1, True), (2, False), (2, True)]


EVERY = 17
"""A test run takes each seventeenth cell: any two values of two axes meet, for no axis has a
multiple of seventeen. ``make proof`` takes all."""


@pytest.mark.parametrize("every", sampled([EVERY, 1], EVERY.__eq__))
@pytest.mark.parametrize("tensor, sequence", CELLS)
def test_every_cell_is_what_a_run_does(tensor, sequence, every):
    chosen = [a for a in cells() if (a.tensor, a.sequence) == (tensor, sequence)]
    assert len(chosen) == 2 * len(SCHEDULES) * 3 * 4 * 3 * 5
    for layout in chosen[::every]:
        assert asked(layout) == claim(layout), layout


def test_a_sample_of_the_cells_has_every_pair_of_values():
    def pairs(layouts):
        return {
            (a, b) for each in layouts
            for a, b in itertools.combinations(vars(each).items(), 2)
        }  # fmt: skip

    whole = list(cells())
    size = len(whole) // (2 * len(CELLS)) * 2
    parts = [whole[n : n + size][::EVERY] for n in range(0, len(whole), size)]
    assert pairs(sum(parts, [])) == pairs(whole)


@pytest.mark.features
def test_stored_states_are_what_a_run_does():
    for layout in stored_states():
        assert asked(layout) == claim(layout), layout
    supported = [layout for layout in stored_states() if refusal(layout) is None]
    assert {(a.precision, a.zero, a.grads_in_fp32, a.pipeline) for a in supported} == {
        ("bf16", zero, in_fp32, pipeline)
        for zero in (1, 2) for in_fp32 in (False, True) for pipeline in (1, 2)
    }  # fmt: skip


@pytest.mark.features
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_every_number_of_micro_batches_is_what_a_run_does(schedule, pipeline):
    chunks = complete_schedule(schedule, None)[1]
    for first, second in itertools.product(range(1, 10), range(0, 10)):
        counts = (first,) if second <= first else (first, second)
        layout = Layout(pipeline=pipeline, schedule=schedule, chunks=chunks, micro_batches=counts)
        assert asked(layout) == claim(layout), layout


@pytest.mark.features
def test_ramp_up_of_the_batch_passes_through_every_size():
    words = ["--rampup-batch-size", "4", "4", "64"]
    layout = Layout(pipeline=2, schedule="interleaved", chunks=2, micro_batches=(8,))
    assert asked(layout, words).micro_batches == (2, 4, 6, 8)


@pytest.mark.features
def test_a_ramp_up_is_refused_with_its_first_bad_size_and_named_only_when_given():
    layout = Layout(pipeline=2, schedule="interleaved", chunks=2, micro_batches=(8,))
    message = asked(layout, ["--rampup-batch-size", "4", "2", "64"])
    assert "3 micro batches per step" in message and "2 or" not in message
    assert "each size of --rampup-batch-size" in message
    long = Layout(pipeline=4, schedule="dualpipev", chunks=2, micro_batches=tuple(range(1, 999)))
    assert len(refusal(long).message(long)) < 500
    assert "1 micro batch per step" in refusal(long).message(long)
    for schedule in ("interleaved", "dualpipev"):
        layout = Layout(pipeline=2, schedule=schedule, chunks=2, micro_batches=(3,))
        assert "--rampup-batch-size" not in refusal(layout).message(layout)


# What the project's documentation promises, written down by hand: "." is refused.
PROMISED = """
                        fp32    bf16    fp16
    dp2                 0123    0123    0123
    tp2                 0123    0123    0123
    tp2-sp              0123    0123    0123
    pp2                 012.    012.    012.
    pp2-interleaved     012.    012.    012.
    pp2-interleaved-v3  012.    012.    012.
    pp2-dualpipev       012.    012.    012.
    pp2-zbh1            012.    012.    012.
    pp2-dualpipev_zb    012.    012.    012.
    tp2-sp-pp2-dp2      012.    012.    012.
    cp2                 0123    0123    0123
    cp4-a2a+p2p-tp2-sp  0123    0123    0123
    cp2-a2a-pp2         012.    012.    012.
    tp2-sp-pp2-zbh1     012.    012.    012.
    tp2-pp2-dualpipev   012.    012.    012.
    sp                  ....    ....    ....
    interleaved         ....    ....    ....
    pp2-1f1b-v2         ....    ....    ....
    pp2-interleaved-v1  ....    ....    ....
    pp2-dualpipev-v3    ....    ....    ....
    zbh1                ....    ....    ....
    pp2-zbh1-v2         ....    ....    ....
"""


@pytest.mark.parametrize("row", PROMISED.strip().splitlines()[1:], ids=lambda row: row.split()[0])
def test_against_what_is_promised(row):
    name, *promised = row.split()
    for precision, cells in zip(PRECISIONS, promised, strict=True):
        found = ""
        for zero in range(4):
            layout = parse_layout(f"{name}-zero{zero}-{precision}")
            found += "." if refusal(layout) else str(zero)
        assert found == cells, (name, precision)


@pytest.mark.parametrize(
    "layout, told",
    [
        (Layout(sequence=True), ["--sequence-parallel, --tensor-model-parallel-size 1:"]),
        (
            Layout(pipeline=2, zero=3),
            ["--zero-stage 3, --pipeline-model-parallel-size 2:", "use --zero-stage 0, 1 or 2"],
        ),
        (
            Layout(pipeline=2, zero=2, offload_optimizer="cpu"),
            ["--zero-stage 2, --pipeline-model-parallel-size 2, offload_optimizer.device cpu"],
        ),
        (Layout(zero=2, offload_param="cpu"), ["offload_param.device cpu", "--zero-stage 2:"]),
        (
            Layout(precision="fp16", zero=1, states=StateDtypes()),
            ["--use-precision-aware-optimizer, --fp16, --zero-stage 1:", "use --bf16"],
        ),
        (Layout(offload_optimizer="nvme"), ["offload_optimizer.device nvme", "--zero-stage 0:"]),
        (
            Layout(pipeline=2, schedule="dualpipev", chunks=2, micro_batches=(3,)),
            ["--pipeline-schedule dualpipev", "3 micro batches per step", "twice as many"],
        ),
    ],
)
def test_a_refusal_names_the_values(layout, told):
    message = refusal(layout).message(layout)
    assert all(text in message for text in told), message
    assert "None" not in message


def test_every_rule_refuses_something_first_and_says_it_once():
    micro = [Layout(pipeline=2, schedule=s, chunks=2, micro_batches=(3,)) for s in SCHEDULES[1:]]
    found = {refusal(layout) for layout in (*cells(), *stored_states(), *micro)} - {None}
    assert found == set(RULES)
    for text in ("name", "reason"):
        assert len({getattr(rule, text) for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    "name, layout",
    [
        ("dp1", Layout()),
        ("zero0-fp32-tp1", Layout()),
        ("dp4-zero3-bf16", Layout(data=4, zero=3, precision="bf16")),
        (
            "tp2-sp-pp2-dp2-zero1-interleaved-bf16",
            Layout(2, True, 2, "interleaved", 2, 2, 1, "bf16"),
        ),
        ("pp2-v4", Layout(pipeline=2, schedule="interleaved", chunks=4)),
        ("pp4-dualpipev", Layout(pipeline=4, schedule="dualpipev", chunks=2)),
        ("tp2-uniform", Layout(tensor=2, recompute="uniform")),
        ("ep2", Layout(data=2, expert=2)),
        ("ep2-tp2", Layout(tensor=2, data=2, expert=2)),
        ("ep2-pp2", Layout(pipeline=2, data=2, expert=2)),
        ("ep2-dp2-zero1", Layout(data=2, zero=1, expert=2)),
        ("ep2-dp4", Layout(data=4, expert=2)),
        ("ep4-tp2-etp1", Layout(tensor=2, data=2, expert=4, expert_tensor=1)),
        ("ep2-tp2-etp1", Layout(tensor=2, expert=2, expert_tensor=1)),
        ("tp2-etp1", Layout(tensor=2, expert_tensor=1)),
        ("tp2-ep2-etp2", Layout(tensor=2, data=2, expert=2)),
        ("ep2-etp1", Layout(data=2, expert=2)),
        ("cp2", Layout(context=2)),
        ("cp2-a2a", Layout(context=2, comm=("a2a",))),
        ("tp2-cp2-allgather-dp2", Layout(tensor=2, data=2, context=2, comm=("allgather",))),
        ("cp4-a2a+p2p", Layout(context=4, comm=("a2a+p2p",), exchanging=2)),
        ("cp2-ep2", Layout(data=2, expert=2, context=2)),
    ],
)
def test_parses_short_names(name, layout):
    assert parse_layout(name) == layout
    assert parse_layout(short_name(layout)) == layout


def test_names_and_flags_round_trip():
    for layout in cells():
        layout = dataclasses.replace(layout, offload_optimizer=None, offload_param=None)
        assert parse_layout(short_name(layout)) == layout, short_name(layout)
    for recompute in RECOMPUTE:
        layout = Layout(recompute=recompute, grads_in_fp32=True, zero=1, precision="bf16")
        assert asked(layout) == layout


@pytest.mark.parametrize(
    "name, told",
    [
        ("ep2-dp3", "dp3 must be a multiple of the 2 data-parallel ranks"),
        ("ep4-tp2-etp1-dp3", "dp3 must be a multiple of the 2 data-parallel ranks"),
        ("ep3-tp2-etp1", "a multiple of 2 as N"),
        ("tp4-etp2", "all 4 tensor-parallel ranks"),
        ("ep2-ep4", "'ep4' sets the expert a second time"),
    ],
)
def test_refuses_sizes_of_experts_that_do_not_fit(name, told):
    with pytest.raises(ConfigError, match=f"^layout {name}: .*{told}"):
        parse_layout(name)


@pytest.mark.features
@pytest.mark.parametrize(
    "name",
    ["cp2", "cp2-a2a", "cp4-a2a+p2p-zero3", "cp2-tp2-sp-bf16", "cp2-pp2-dualpipev", "cp2-dp2-fp16"],
)
def test_layouts_of_a_context_are_what_a_run_does(name):
    layout = parse_layout(name)
    assert asked(layout) == layout
    assert layout.processes % layout.context == 0


def test_zero_partitions_over_a_context():
    stages = {name: parse_layout(f"{name}-zero3").running_zero for name in ("cp2", "dp2", "tp2")}
    assert stages == {"cp2": 3, "dp2": 3, "tp2": 1}


@pytest.mark.parametrize(
    "name, told",
    [
        ("a2a", "'a2a' is how the ranks of cpN communicate, where N is 2 or more"),
        ("cp2-a2a+p2p", "a multiple of 4 with 'a2a+p2p'"),
        ("cp2-a2a-allgather", "'allgather' sets the comm a second time"),
    ],
)
def test_refuses_communication_that_does_not_fit(name, told):
    with pytest.raises(ConfigError) as raised:
        parse_layout(name)
    assert str(raised.value).startswith(f"layout {name}: ") and told in str(raised.value)


@pytest.mark.parametrize(
    "name, told",
    [
        ("tp2-xp2", "'xp2'"),
        ("", "''"),
        ("tp2--sp", "''"),
        ("TP2", "'TP2'"),
        ("tp0", "'tp0'"),
        ("zero4", "'zero4'"),
        ("tp", "'tp'"),
        ("tp2-tp4", "'tp4' sets the tensor a second time"),
        ("bf16-fp16", "'fp16' sets the precision a second time"),
    ],
)
def test_refuses_names_that_it_does_not_know(name, told):
    with pytest.raises(ConfigError) as raised:
        parse_layout(name)
    assert told in str(raised.value)
    assert "second" in told or "tpN, sp, ppN, vN" in str(raised.value)


@pytest.mark.parametrize(
    "name, kept",
    [
        ("dp4-zero3", "all"),
        ("pp2-dp2", "all"),
        ("tp2", "hidden"),
        ("tp2-pp2", "hidden"),
        ("tp2-sp", "none"),
        ("cp2", "hidden"),
        ("cp2-tp2-sp", "none"),
    ],
)
def test_dropout_masks(name, kept):
    assert parse_layout(name).dropout == kept


@pytest.mark.parametrize(
    "name, fewest", [("dp4", 1), ("pp4", 1), ("pp4-interleaved", 4), ("pp4-dualpipev", 8)]
)
def test_fewest_micro_batches_are_taken_and_one_fewer_is_not(name, fewest):
    layout = parse_layout(name)
    assert layout.fewest_micro_batches == fewest
    assert refusal(dataclasses.replace(layout, micro_batches=(fewest, 2 * fewest))) is None
    if fewest > 1:
        assert refusal(dataclasses.replace(layout, micro_batches=(fewest - 1,)))
