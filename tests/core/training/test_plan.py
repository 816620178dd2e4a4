"""Lengths and positions of a run, from its flags; token-driven runs against a loop of steps."""

import itertools
import json
import math

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.training.plan import TrainingPlan

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --lr 1 "
    "--micro-batch-size 1 --global-batch-size 4 --eval-interval 3 --eval-iters 2 "
)


def plan(flags):
    settings = FlagParser(*FLAG_CLASSES).settings((FLAGS + flags).split())
    return TrainingPlan(resolve(settings, 1).config)


@pytest.mark.features
@pytest.mark.parametrize(
    "flags, steps",
    [
        ("--train-iters 5", 5),
        ("--train-samples 11", 2),
        ("--train-tokens 128", 2),
        ("--train-tokens 113", 2),
        ("--train-samples 16 --rampup-batch-size 2 2 8", 6),
    ],
)
def test_steps(flags, steps):
    assert plan(flags).train_iters == steps


@pytest.mark.parametrize("flags", ["--train-samples 3", "--train-tokens 48"])
def test_less_than_a_step_is_refused(flags):
    with pytest.raises(ConfigError, match=f"{flags} is less than one step takes: 4 samples of 16"):
        plan(flags)
    assert plan("--skip-train").train_iters == 0


def test_validation_reads_on_and_stays_within_its_samples():
    course = plan("--train-iters 8")
    _, valid_samples, _ = course.sample_counts
    evaluated = [3, 6, 8]
    starts = [course.valid_samples_before(iteration) for iteration in evaluated]
    assert starts == [0, 8, 16]
    assert starts[-1] + 8 == valid_samples
    assert course.valid_samples_before(10**6) == 16, "a checkpoint past the end of this run"
    assert plan("--skip-train").valid_samples_before(10**6) == 0


def test_weight_decay_follows_the_length_of_the_run():
    """Also where the learning rate follows tokens."""
    flags = "--start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear "
    course = plan(f"{flags} --train-iters 10 --lr-decay-tokens 64")
    rate, decay = course.rates(5, 20)
    assert (rate, decay) == (0.0, pytest.approx(0.05))


def lengths_in_json(highest, steps):
    schedule = {"total_curriculum_step": steps, "difficulty_step": 8}
    text = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8}
    text |= {
        "max_difficulty": highest,
        "schedule_type": "fixed_linear",
        "schedule_config": schedule,
    }
    return json.dumps(text, separators=(",", ":"))


def rate_of_upstream(flags, style, step, tokens, state):
    """Megatron-DeepSpeed's rate at ``step`` samples and ``tokens``; ``state`` keeps W, the tokens
    at the end of the warm-up."""
    high, low = 1.0, 0.1
    warm_steps = flags.get("--lr-warmup-samples", 0)
    warm_tokens = flags.get("--lr-warmup-tokens") or state.get("W")
    decay = flags.get("--lr-decay-tokens")
    if flags.get("--lr-warmup-tokens") and tokens <= warm_tokens:
        return high * tokens / warm_tokens
    if not flags.get("--lr-warmup-tokens") and step <= warm_steps > 0:
        if step == warm_steps:
            state["W"] = tokens
        return high * step / warm_steps
    if style == "constant":
        return high
    at, start, end = (tokens, warm_tokens or 0, decay) if decay else (
        step, warm_steps, flags.get("--lr-decay-samples", flags["--train-samples"])
    )  # fmt: skip
    if at > end:
        return low
    if style == "inverse-square-root":
        return max(low, high * math.sqrt(max(1, start)) / math.sqrt(max(1, at)))
    ratio = (at - start) / (end - start)
    if style == "linear":
        return low + (1 - ratio) * (high - low)
    return low + 0.5 * (math.cos(math.pi * ratio) + 1) * (high - low)


RAMP = "--rampup-batch-size 2 2 8"
BY_TOKENS = [
    {"--lr-decay-tokens": 700, "--lr-warmup-tokens": 100},
    {"--lr-decay-tokens": 700, "--lr-warmup-samples": 8},
    {"--lr-decay-tokens": 700},
    {"--lr-warmup-tokens": 100},
    {"--lr-decay-samples": 60, "--lr-warmup-samples": 8},
    {"--lr-decay-tokens": 700, "--lr-decay-samples": 9, "--lr-warmup-tokens": 64,
     "--lr-warmup-samples": 8},
]  # fmt: skip
STYLES = ("constant", "linear", "cosine", "inverse-square-root")
COURSES = ("", RAMP, "lengths", f"lengths {RAMP}")
DEFAULT = (f"lengths {RAMP}", 800, "samples"), ("lengths", 801, "iters")


@pytest.mark.features
@pytest.mark.parametrize(
    ("course", "total", "unit"),
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.proof)
        for case in itertools.product(COURSES, (800, 801, 100_000), ("samples", "iters"))
        if case[2] == "samples" or RAMP not in case[0]
    ],
)
def test_tokens_end_a_run_whose_data_another_length_sizes(course, total, unit):
    text = f" --curriculum-learning {lengths_in_json(16, 7)}" if "lengths" in course else ""
    course = course.replace("lengths", "") + text
    # Samples within the length of the data; a last batch that would exceed it is left out.
    sizes = [2, 2, 2, 2, *[4] * 30] if RAMP in course else [4] * 40
    full = sum(sum(sizes[:n]) <= 101 for n in range(1, 35))
    for schedule, style in itertools.product(BY_TOKENS, STYLES):
        flags = {"--train-samples": 101 if unit == "samples" else 100, "--train-tokens": total}
        flags |= schedule
        words = [f"{name} {value}" for name, value in flags.items()]
        if unit == "iters":
            if style == "inverse-square-root" and schedule == {"--lr-warmup-tokens": 100}:
                continue  # falls from step 1 on, and upstream's steps are samples
            words = [
                f"{name.replace('samples', 'iters')} {value // 4 if 'samples' in name else value}"
                for name, value in flags.items()
            ]
        run = plan(f"{' '.join(words)} --lr-decay-style {style} --min-lr 0.1 {course}")
        samples = tokens = iteration = 0
        state = {}
        while iteration < full and tokens < total:
            rate = rate_of_upstream(flags, style, samples, tokens, state)
            assert run.rates(iteration, samples)[0] == pytest.approx(rate, rel=1e-12), iteration
            assert run.progress(iteration, samples, "tokens") == tokens
            assert iteration < run.train_iters
            iteration += 1
            length = min(16, int(iteration / 7 * (16 - 8) + 8) // 8 * 8) if text else 16
            samples += sizes[iteration - 1]
            tokens += sizes[iteration - 1] * length
        assert (run.train_iters, run.full_iters) == (iteration, full)
    alone = plan(f"{words[0]} {course}")
    assert run.sample_counts == alone.sample_counts and run.batch_sizes() == alone.batch_sizes()


def test_a_share_of_the_steps_is_a_warm_up_before_a_decay_of_tokens():
    base = "--train-iters 50 --train-tokens 3000 --lr-decay-tokens 700"
    share, steps = plan(f"{base} --lr-warmup-fraction 0.04"), plan(f"{base} --lr-warmup-iters 2")
    rates = [share.rates(n, 4 * n)[0] for n in range(40)]
    assert rates[:3] == [0, 0.5, 1] and rates == [steps.rates(n, 4 * n)[0] for n in range(40)]
    assert rates[3] == 1 - 64 / (700 - 128)


def test_a_run_whose_only_length_is_tokens_may_have_a_warm_up_of_steps():
    run = plan("--train-tokens 640 --lr-warmup-iters 3")
    assert [run.rates(n, 4 * n)[0] for n in (0, 3, 4)] == [0, 1, 1 - 64 / (640 - 192)]
