"""Runs with ``--rl``: the policy that draws is the one in training, to the last bit, in every
layout that promises it; and runs that continue."""

import numpy as np
import pytest
from reinforcement_runs import prompts, same, train

LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "zero1": (2, "--zero-stage 1"),
    "zero3": (2, "--zero-stage 3"),
    "ep2": (2, "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2"),
    "lora": (1, "--lora --lora-rank 4"),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2"),
    "pp2-dp2": (4, "--pipeline-model-parallel-size 2 --zero-stage 1"),
}
SAMPLE = {("zero3", "bf16"), ("tp2", "fp32")}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return prompts(tmp_path_factory.mktemp("prompts"))


def cells():
    for layout in LAYOUTS:
        for dtype in ("fp32", "bf16"):
            yield pytest.param(layout, dtype, 200, marks=pytest.mark.proof)
            if (layout, dtype) in SAMPLE:
                yield layout, dtype, 3


@pytest.mark.parametrize(("layout", "dtype", "count"), list(cells()))
def test_policy_of_sampling_is_that_of_training(pool, data, layout, dtype, count):
    processes, flags = LAYOUTS[layout]
    argv = [*data, *flags.split(), "--train-iters", str(count), "--rl-exact", "require"]
    argv += ["--bf16"] * (dtype == "bf16")
    for steps in pool.run(processes, train, argv):
        assert steps.sampling == [(0.0, 0.0)] * count
        assert len({*steps.losses}) > count // 2


def test_other_kernel_ends_the_run(pool, data):
    argv = [*data, "--train-iters", "3", "--rl-exact"]
    (steps,) = pool.run(1, train, [*argv, "auto"], True)
    assert all(0 < difference < 1e-3 for _, difference in steps.sampling)
    with pytest.raises(Exception, match=r"step 1, samples 0 to 7: .* same bits .*require"):
        pool.run(1, train, [*argv, "require"], True)


@pytest.mark.parametrize(
    ("layout", "flags", "reason"),
    [
        ("tp2", "--sequence-parallel", "--sequence-parallel divides the row of texts"),
        ("one", "--hidden-dropout 0.1", "dropout is for training only"),
    ],
)
def test_layouts_that_cannot(pool, data, layout, flags, reason):
    processes, of_layout = LAYOUTS[layout]
    argv = [*data, *of_layout.split(), *flags.split(), "--train-iters", "2"]
    with pytest.raises(Exception, match=reason):
        pool.run(processes, train, [*argv, "--rl-exact", "require"])
    steps, *_ = pool.run(processes, train, argv)
    assert all(0 < difference < 1 for _, difference in steps.sampling)


CONTINUED = {
    "passes": "--steps-per-generation 2 --num-iterations 2",
    "stale": "--rl-staleness 1",
    "stale-passes": "--rl-staleness 1 --num-iterations 2",
    "replaced": "--dynamic-sampling 2",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "passes" else pytest.mark.proof) for c in CONTINUED]
)
def test_continued_in_the_middle_of_a_generation(pool, data, tmp_path, case):
    flags = [*data, *CONTINUED[case].split(), "--train-iters", "7"]
    (whole,) = pool.run(1, train, flags)
    saved = [*flags, "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    (first,) = pool.run(1, train, [*saved, "--exit-interval", "3"])
    (second,) = pool.run(1, train, saved)
    assert first.losses + second.losses == whole.losses
    assert first.written + second.written == whole.written
    assert same(second, whole)


def test_texts_of_later_steps(pool, data):
    """Texts are written when their generation begins; with staleness a step before."""

    def written(*flags):
        (steps,) = pool.run(1, train, [*data, "--train-iters", "4", *flags])
        drift = [difference > 0 for _, difference in steps.sampling]
        return [prompt for prompt, _ in steps.written], drift

    each, drift = written()
    assert drift == [False] * 4
    prompts_of_two, drift = written("--steps-per-generation", "2")
    assert prompts_of_two == each and drift == [False, True] * 2
    passes, drift = written("--num-iterations", "2")
    assert passes == each[: len(each) // 2] and drift == [False, True] * 2
    stale, drift = written("--rl-staleness", "1")
    assert stale == each and drift == [False, True, True, True]


def test_replaced_groups_are_the_same_everywhere(pool, data):
    argv = [*data, "--train-iters", "3", "--dynamic-sampling", "2", "--max-completion-length", "1"]
    (one,) = pool.run(1, train, argv)
    both = pool.run(2, train, argv)
    assert [steps.written for steps in both] == [one.written] * 2
    np.testing.assert_allclose(both[0].losses, one.losses, rtol=0, atol=1e-6)
