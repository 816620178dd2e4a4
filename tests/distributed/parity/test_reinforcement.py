"""Losses of reinforcement learning on given texts: every gradient of every layout against one
process, in float64."""

import drawn_episodes
import pytest
import torch
import training_jobs
from against_one_process import difference, reference
from family_models import NO_DROPOUT
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY, depth

from megatron.apps.parity.gradients import INIT
from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.runs import PlainTraining


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
    "ppo-lora": "--rl ppo --lora --lora-rank 3",
    "distill": "--rl distill --jsd-beta 0.3 --temperature 0.8",
}
SAMPLE = {
    ("tp2-sp", "untied", "distill"),
    ("tp2-pp2", "tied", "ppo-lora"),
    ("cp2", "untied", "gspo"),
}
"""What the normal run has; `make proof` has the rest."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, pool):
    """A model of other sizes than the student."""
    folder = tmp_path_factory.mktemp("teacher")
    sizes = "--num-layers 9 --hidden-size 48 --num-attention-heads 4 --train-iters 2".split()
    argv = [*TINY, *sizes, *LLAMA, *NO_DROPOUT, "--model-family", "gpt", "--save", str(folder)]
    pool.run(1, training_jobs.train, argv)
    return str(folder)


def flags(layout, model, algorithm, teacher=""):
    parsed = parse_layout(layout)
    batch = 2 * parsed.fewest_micro_batches * parsed.data
    argv = ["--model-family", "writing_gpt", *TINY, *MODELS[model], *depth(layout)]
    argv += [*ALGORITHMS[algorithm].split(), "--max-completion-length", "8"]
    argv += ["--load-teacher", teacher] * (algorithm == "distill")
    argv += ["--micro-batch-size", "2", "--global-batch-size", str(batch), "--train-iters", "1"]
    return parsed.processes, [*argv, *NO_DROPOUT]


def cells():
    for layout in (*LAYOUTS, *CONTEXT_LAYOUTS):
        for model in MODELS:
            for algorithm in ALGORITHMS:
                marks = () if (layout, model, algorithm) in SAMPLE else (pytest.mark.proof,)
                yield pytest.param(layout, model, algorithm, marks=marks)


@pytest.mark.parametrize(("layout", "model", "algorithm"), list(cells()))
def test_gradients_against_one_process(pool, request, layout, model, algorithm):
    teacher = request.getfixturevalue("teacher") if algorithm == "distill" else ""
    processes, argv = flags(layout, model, algorithm, teacher)
    expected = reference(*argv)
    assert all(each.values.any() for each in expected.gradients)
    assert difference(pool, processes, argv, flags_for(parse_layout(layout)), gradients) is None


@pytest.mark.parametrize("algorithm", ["ppo-lora", pytest.param("ppo", marks=pytest.mark.proof)])
def test_gradients_against_differences(algorithm):
    """The slope of the loss along the gradient of each parameter that is trained, in float64."""
    _, argv = flags("dp2", "untied", algorithm)
    plain = PlainTraining(argv, dtype=torch.float64, init=INIT)
    plain.accumulate()
    gradients = {name: param.grad for name, param in plain.params.items() if param.requires_grad}
    names = {name.rpartition(".")[2] for name in gradients}
    assert any(name.startswith("value_head") for name in gradients)
    assert (names == {"lora_a", "lora_b", "weight", "bias"}) == (algorithm == "ppo-lora")
    for name in sorted(gradients, key=str.__hash__)[:6] + ["value_head.weight", "value_head.bias"]:
        direction = gradients[name] / gradients[name].norm()
        losses = []
        for step in (1e-5, -1e-5):
            moved = PlainTraining(argv, dtype=torch.float64, init=INIT)
            with torch.no_grad():
                moved.params[name] += step * direction
            losses.append(float(moved.accumulate()))
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx(float(gradients[name].norm()), rel=1e-6), name
