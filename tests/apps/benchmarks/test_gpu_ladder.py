"""Which cells benchmarks/gpu.py has: shapes, order, estimates, and what is too large to start."""

import dataclasses
import math

import pytest
from contestants.flags import flags_of
from contestants.process import environment
from contestants.registry import contestant, is_ours
from contestants.report import shape_of
from gpu_suite.ladder import (
    ABLATIONS,
    BASE,
    CHOSEN_TESTS,
    FP8,
    FPDT,
    GPU_TESTS,
    GROUPS,
    STATES_B,
    SWITCHED,
    TESTS,
    cells,
    selection,
    turned_off,
)
from gpu_suite.shapes import SHAPES, products, step_flops
from gpu_suite.training import CannotFit, Room, halved, predicted

from megatron.families import family_of
from megatron.features.experts.costs import with_experts
from megatron.kernels.switches import SWITCHES
from megatron.run.run import parse_run

WORK = cells("full")
TRAINED = [cell for cell in WORK if cell.shape]
PLAN = ("graphs", "ceilings", "main", "llmq", "switched", "ranks", "tests")
H100 = Room(85_000_000_000)


def test_the_order_is_that_of_value():
    groups = list(dict.fromkeys(cell.group for cell in WORK))
    assert groups[:7] == list(PLAN) and set(groups) == set(GROUPS)
    names = [cell.name for cell in WORK]
    assert len(set(names)) == len(names)
    assert names[2:6] == [
        "main-1.3B-bf16", "main-1.3B-fp8", "llmq-Qwen2.5-1.5B-bf16", "llmq-Qwen2.5-1.5B-fp8",
    ]  # fmt: skip
    assert all(cell.trace for cell in WORK if cell.group == "main")


def test_the_plan_takes_eight_to_ten_minutes():
    """Graphs, ceilings, two shapes, operators, ranks, tests; and says something about each."""
    first = names_of_plan()
    seconds = sum(cell.seconds(989e12) for cell in WORK if cell.name in first)
    assert 6 * 60 < seconds < 10 * 60
    off = [set(cell.without) for cell in WORK if cell.group == SWITCHED]
    assert set(SWITCHES) == set.union(*off) and off.count({"swiglu"}) == 1 and set() in off


def names_of_plan() -> set[str]:
    names = [cell.name for cell in WORK]
    return set(names[: names.index("tests-chosen") + 1])


def test_every_cell_takes_few_minutes_by_estimate():
    seconds = {cell.name: cell.seconds(989e12) for cell in WORK}
    assert max(seconds.values()) < 330
    tuned = [name for name in seconds if "autotune" in name]
    assert len(tuned) == 1 and seconds[tuned[0]] > 2 * seconds["ablations-1.3B-all-of-it"]
    # A slower device takes longer, less the start.
    assert TRAINED[0].seconds(312e12) > 1.5 * TRAINED[0].seconds(989e12)


@pytest.mark.parametrize(
    ("name", "tokens_per_second", "rate", "share"),
    [
        ("Qwen2.5-1.5B", 59_101, 562.98e12, 0.569),
        ("Qwen2.5-3B", 30_935, 586.75e12, 0.593),
        ("Qwen2.5-7B", 13_856, 596.34e12, 0.603),
    ],
)
def test_flops_of_llmqs_shapes_are_counted_as_llmq_counts(name, tokens_per_second, rate, share):
    """Its published tokens per second, and the share of 989.4 TFLOP/s that it prints."""
    setting = SHAPES[name].setting()
    assert setting.tokens_per_step == 524_288 and setting.seq_length == 1024
    reached = step_flops(setting) / setting.tokens_per_step * tokens_per_second
    assert reached == pytest.approx(rate, rel=1e-4)
    assert reached / 989.4e12 == pytest.approx(share, abs=6e-4)


def test_parameters_of_the_shapes():
    """They are what they are called, within 7 %; LLMQ's as in Qwen2.5's model cards, a Retro as
    the GPT in it."""
    published = {"Qwen2.5-1.5B": 1.54e9, "Qwen2.5-3B": 3.09e9, "Qwen2.5-7B": 7.62e9}
    for name in dict.fromkeys(cell.shape for cell in TRAINED):
        setting = SHAPES[name].setting()
        linear = products(setting)
        head = math.prod(linear.pop("head"))
        tied = setting.architecture in ("gpt2", "bert", "t5", "retro") or setting.tied
        mlp = math.prod(linear["up"]) + math.prod(linear["down"])
        block = sum(map(math.prod, linear.values())) + mlp * (max(1, setting.experts) - 1)
        if setting.decoder_length:  # a decoder's block has another attention
            block += block + linear["qkv"][0] * linear["qkv"][1] + math.prod(linear["proj"])
        count = setting.layers * block + head * (1 if tied else 2)
        size = name.rpartition("-")[2]
        called = published.get(name) or float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
        assert count == pytest.approx(called, rel=0.005 if name in published else 0.07), name


def test_flags_are_the_shapes():
    """The trainer builds the shape that the table of shapes describes."""
    from megatron.apps.planning.parameters import model_parameters
    from megatron.families import build_model

    run = parse_run(None, flags_of(SHAPES["Qwen2.5-1.5B"].setting(), 1))
    assert model_parameters(run.config.model) == 1_543_714_304  # of Qwen2.5-1.5B
    model = run.config.model
    assert model.embedding.tied and model.positions.rotary_base == 1e6
    tiny = parse_run(None, flags_of(SHAPES["tiny-qwen"].setting(), 1)).config.model
    biases = [name for name, _ in build_model(tiny).canonical_parameters() if "bias" in name]
    assert biases == ["layers.0.attention.qkv.bias"]


def test_a_retro_is_counted_as_it_is_built():
    setting = SHAPES["Retro-350M"].setting()
    model = parse_run(None, flags_of(setting, 1), "retro").config.model
    model = model.with_vocabulary(setting.vocab_size)
    ours, theirs = family_of("retro").shape(model), shape_of(setting)
    for causal in (False, True):
        assert ours.flops_per_step(1, causal=causal) == theirs.flops_per_step(1, causal=causal)
    alone = dataclasses.replace(setting, architecture="gpt2")
    assert step_flops(setting) > 1.4 * step_flops(alone)


def test_the_trainer_knows_the_flags():
    """Each variant's command line becomes a run, without a model."""
    entrants = {cell.contestant: cell for cell in TRAINED if is_ours(cell.contestant)}
    assert len(entrants) > 15  # without them it would show nothing
    for name, cell in entrants.items():
        entrant = contestant(name)
        flags = flags_of(cell.setting, entrant.stage, entrant.flags)
        run = parse_run(None, flags, cell.setting.family)
        compiled = run.config.fast_paths.torch_compile in (True, "on")
        assert compiled == ("torch-compile" in name.split("+"))


def test_each_optimisation_is_taken_from_the_same_base():
    """No flag twice, no variant twice."""
    names = [name for _, name in turned_off(BASE)]
    assert names[0] == BASE and len(set(names)) == len(names)
    for name in names:
        flags = [flag.partition("=")[0] for flag in name.split("+")]
        assert len(set(flags)) == len(flags), name
    assert sum(cell.group == ABLATIONS for cell in WORK) == len(names)


def test_half_the_micro_batch_is_the_same_step():
    setting = SHAPES["Qwen2.5-1.5B"].setting()
    half = halved(setting)
    assert half.micro_batch * 2 == setting.micro_batch
    assert half.tokens_per_step == setting.tokens_per_step
    assert halved(SHAPES["1.3B"].setting(micro_tokens=2048)) is None
    # An odd one is rounded down; the number of micro batches is then not a whole one of before.
    odd = halved(SHAPES["1.3B"].setting(micro_tokens=3 * 2048))
    assert (odd.micro_batch, odd.micro_batches) == (1, 30)


def test_what_cannot_fit_is_known_before_it_starts():
    """fp32 states of 7B need more than an H100 has; 3B and the smaller ones fit."""
    base = contestant(BASE)
    with pytest.raises(CannotFit, match=r"predicted to need \d+\.\d GB .* the device has 85.0 GB"):
        H100.refuse(predicted(base, halved(SHAPES["Qwen2.5-7B"].setting(micro_tokens=8192))))
    for name in ("1.3B", "3B", "Qwen2.5-1.5B", "Qwen2.5-3B"):
        H100.refuse(predicted(base, halved(SHAPES[name].setting())))
    H100.refuse(predicted(base, SHAPES["3B"].setting(seq_length=8192)))
    Room(None).refuse(predicted(base, SHAPES["Qwen2.5-7B"].setting(micro_tokens=8192)))


@pytest.mark.parametrize(
    ("given", "seen"), [(None, "0"), ("", ""), ("3,1", "3"), ("GPU-8932f937", "GPU-8932f937")]
)
def test_a_contestant_sees_one_gpu(monkeypatch, given, seen):
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    setting = SHAPES["1.3B"].setting()
    assert environment(setting, tuned_malloc=False)["CUDA_VISIBLE_DEVICES"] == seen


def test_experts_count_as_the_trainer_counts_them():
    """FLOPs of a token of the shape are those of the model that the flags build."""
    for name in ("Qwen3-MoE-3.8B", "Mixtral-4.6B"):
        setting = SHAPES[name].setting()
        run = parse_run(None, flags_of(setting, 1))
        model = run.config.model.with_vocabulary(setting.vocab_size)
        ours = with_experts(family_of("gpt").shape(model), model)
        assert shape_of(setting).flops_per_token(causal=True) == ours.flops_per_token(causal=True)


def test_long_sequences_are_predicted_with_what_saves_memory():
    """Half a million tokens of layers of 8B, and 131,072 of 1.24B; without tiles neither."""
    for shape, length in (("Llama3-8B-layers-1.5B", 524_288), ("Llama3-1.24B", 131_072)):
        setting = SHAPES[shape].setting(length, length)
        H100.refuse(predicted(contestant(BASE + STATES_B + FPDT), setting))
        with pytest.raises(CannotFit):
            H100.refuse(predicted(contestant(BASE + STATES_B), setting))


def test_fp8_shapes_have_sizes_of_16():
    for cell in TRAINED:
        if FP8 in cell.contestant:
            sizes = [size for pair in products(cell.setting).values() for size in pair]
            assert all(size % 16 == 0 for size in sizes), cell.name


def test_each_chosen_test_is_there_once():
    """And every file has a cell of its own, later."""
    text = "".join(file.read_text() for file in GPU_TESTS.glob("test_*.py"))
    for name in CHOSEN_TESTS:
        assert f"def {name.partition('[')[0]}(" in text, name
    files = [selection(cell) for cell in WORK if cell.group == TESTS][1:]
    assert sorted(files) == sorted([f"tests/gpu/{file.name}"] for file in GPU_TESTS.glob("test_*"))


def test_fp8_keeps_its_weights_next_to_those_of_16_bits():
    """7B in 8 bytes a parameter: 1 for each of its 6.53e9 in blocks; tried with few samples."""
    setting = SHAPES["Qwen2.5-7B"].setting(micro_tokens=2048)
    bf16, fp8 = (predicted(contestant(BASE + STATES_B + more), setting) for more in ("", FP8))
    assert fp8.weights - bf16.weights == pytest.approx(6.525e9, rel=0.01)
    H100.refuse(fp8)
    with pytest.raises(CannotFit):
        H100.refuse(
            predicted(
                contestant(BASE + STATES_B + FP8), SHAPES["Qwen2.5-7B"].setting(micro_tokens=8192)
            )
        )
