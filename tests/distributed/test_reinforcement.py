"""Runs with ``--rl``: the policy that draws is the one in training, to the last bit, in every
layout that promises it; and runs that continue."""

import numpy as np
import pytest
from reinforcement_runs import prompts, reward, same, train

PPO = "--rl ppo --num-generations 1 --num-iterations 1"
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
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "latent": (
        2,
        "--multi-latent-attention --num-query-groups 4 --qk-layernorm --q-lora-rank 12 "
        "--kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
        "--tensor-model-parallel-size 2",
    ),
    "ppo-lora": (
        2,
        f"{PPO} --lora --lora-rank 4 --tensor-model-parallel-size 2 --ffn-hidden-size 48",
    ),
    "ppo-zero3": (2, f"{PPO} --zero-stage 3"),
}
TP4 = {"tp4": (4, "--tensor-model-parallel-size 4")}
SAMPLE = {("zero3", "bf16"), ("ppo-lora", "fp32")}


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
    # The longer a text, the more passes of the model it takes.
    argv += ["--max-completion-length", "5"] * (count > 3)
    for steps in pool.run(processes, train, argv, timeout=580):
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
        pytest.param("tp4", "", "--tensor-model-parallel-size 4 adds up in an order",
                     marks=pytest.mark.proof),
        # Rows of 22 numbers, on a rank, are aligned differently; some kernels have other code then.
        ("tp2", "--lora --lora-rank 8", "products of this processor depend on"),
    ],
)  # fmt: skip
def test_layouts_that_cannot(pool, data, layout, flags, reason):
    processes, of_layout = (LAYOUTS | TP4)[layout]
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
    "ppo": "--rl ppo --num-generations 1 --num-iterations 3 --beta 0.1",
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
    assert first.rewards + second.rewards == whole.rewards
    assert same(second, whole)


BACK = {
    "grpo": (3, ""),
    "replaced": (3, "--dynamic-sampling 2 --max-completion-length 1"),
    "stale": (4, "--rl-staleness 1"),
    "curriculum": (4, "--rl-curriculum success --curriculum-success 0.8"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "stale" else pytest.mark.proof) for c in BACK]
)
def test_rollback_is_a_run_without_the_samples(pool, data, tmp_path, case):
    """The checkpoint is that after two steps; the step with the spike is repeated on others."""
    step, more = BACK[case]
    argv = [*data, *more.split(), "--train-iters", "6"]
    skipped = ["--skip-samples", f"{8 * (step - 1)}:{8 * step}"]
    (unbroken,) = pool.run(1, train, [*argv, *skipped])
    saved = ["--save", str(tmp_path / "run"), "--save-interval", "2", "--on-spike", "rollback"]
    (back,) = pool.run(1, train, [*argv, *saved], False, step)
    assert len(back.losses) == 6 + step - 2
    assert back.losses[:2] + back.losses[step:] == unbroken.losses
    assert same(back, unbroken)


def test_rollback_needs_one_step_for_each_text(pool, data, tmp_path):
    argv = [*data, "--train-iters", "2", "--num-iterations", "2", "--save", str(tmp_path)]
    with pytest.raises(Exception, match="on the same texts.*--on-spike rollback would leave one"):
        pool.run(1, train, [*argv, "--on-spike", "rollback"])


def test_ppo_does_not_continue_without_values(pool, data, tmp_path):
    argv = [*data, "--train-iters", "1", "--save", str(tmp_path)]
    pool.run(1, train, argv)
    with pytest.raises(Exception, match="saved without the value head of --rl ppo"):
        pool.run(1, train, [*argv, "--load", str(tmp_path), *PPO.split()])


def test_texts_of_later_steps(pool, data):
    """Texts are written when their generation begins; with staleness a step before. The log of a
    step has the reward of the texts that it trains on."""

    def written(generations, *flags):
        (steps,) = pool.run(1, train, [*data, "--train-iters", "4", *flags])
        rewards_E = [reward(np.frombuffer(text, np.int64)) for _, text in steps.written]
        of_each = np.reshape(rewards_E, (generations, -1)).mean(1)
        np.testing.assert_allclose(steps.rewards, of_each.repeat(4 // generations), rtol=1e-12)
        drift = [difference > 0 for _, difference in steps.sampling]
        return [prompt for prompt, _ in steps.written], drift

    each, drift = written(4)
    assert drift == [False] * 4
    prompts_of_two, drift = written(2, "--steps-per-generation", "2")
    assert prompts_of_two == each and drift == [False, True] * 2
    passes, drift = written(2, "--num-iterations", "2")
    assert passes == each[: len(each) // 2] and drift == [False, True] * 2
    stale, drift = written(4, "--rl-staleness", "1")
    assert stale == each and drift == [False, True, True, True]


def test_replaced_groups_are_the_same_everywhere(pool, data):
    argv = [*data, "--train-iters", "3", "--dynamic-sampling", "2", "--max-completion-length", "1"]
    (one,) = pool.run(1, train, argv)
    both = pool.run(2, train, argv)
    assert [steps.written for steps in both] == [one.written] * 2
    np.testing.assert_allclose(both[0].losses, one.losses, rtol=0, atol=1e-6)
