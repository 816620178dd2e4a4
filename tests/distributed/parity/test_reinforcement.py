"""Losses of reinforcement learning on given texts: every gradient of every layout against one
process, in float64."""

from functools import cache

import drawn_episodes
import pytest
import training_jobs
from family_models import NO_DROPOUT
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY, depth

from megatron.apps.parity.gradients import first_difference, reference_gradients
from megatron.config.layouts import parse_layout
from megatron.families import trained_spec
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run


@pytest.fixture(autouse=True)
def families_of_drawn_texts():
    drawn_episodes.known()
    yield
    drawn_episodes.unknown()


def gradients(argv):
    """For the pool."""
    drawn_episodes.known()
    return training_jobs.gradients(argv)


LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --logits-chunk-mib 1"
).split()
MODELS = {"tied": [], "untied": LLAMA}
ALGORITHMS = {
    "grpo": "--rl grpo --entropy-coef 0.1 --temperature 0.8",
    "dr_grpo": "--rl dr_grpo --beta 0.1 --kl-estimator k2 --mask-truncated-completions",
    "dapo": "--rl dapo --off-policy-mask-threshold 0.05 --delta 1.5",
    "gspo": "--rl gspo --epsilon 0.05 --epsilon-high 0.06 --beta 0.1",
    "rloo": "--rl rloo --importance-sampling-correction sequence_truncate",
    "reinforce++": "--rl reinforce++ --importance-sampling-correction token_mask",
    "ppo": "--rl ppo --vf-coef 0.5",
    "online-dpo": "--rl online-dpo",
}
SAMPLE = {
    ("tp2-sp", "untied", "grpo"),
    ("tp2-pp2", "tied", "ppo"),
    ("cp2", "untied", "gspo"),
}
"""What the normal run has; `make proof` has the rest."""


def flags(layout, model, algorithm):
    parsed = parse_layout(layout)
    batch = 2 * parsed.fewest_micro_batches * parsed.data
    argv = ["--model-family", "writing_gpt", *TINY, *MODELS[model], *depth(layout)]
    argv += [*ALGORITHMS[algorithm].split(), "--max-completion-length", "8"]
    argv += ["--micro-batch-size", "2", "--global-batch-size", str(batch), "--train-iters", "1"]
    return parsed.processes, [*argv, *NO_DROPOUT]


@cache
def reference(*argv: str):
    return reference_gradients(list(argv))


def cells():
    for layout in (*LAYOUTS, *CONTEXT_LAYOUTS):
        for model in MODELS:
            for algorithm in ALGORITHMS:
                marks = () if (layout, model, algorithm) in SAMPLE else (pytest.mark.proof,)
                yield pytest.param(layout, model, algorithm, marks=marks)


@pytest.mark.parametrize(("layout", "model", "algorithm"), list(cells()))
def test_gradients_against_one_process(pool, layout, model, algorithm):
    processes, argv = flags(layout, model, algorithm)
    expected = reference(*argv)
    assert all(each.values.any() for each in expected.gradients)
    records = pool.run(processes, gradients, [*argv, *parse_layout(layout).flags()])
    layers = trained_spec(parse_run(None, argv).config).layers(TensorParallel())
    assert first_difference(records, expected, layers) is None
