"""Losses of preferences: every gradient of every layout against one process, and training through
the engine, as test_gradients.py and test_training.py do it for the next token."""

import drawn_preferences
import pytest
import training_jobs
from against_one_process import check_training, difference, reference
from family_models import FAMILIES, NO_DROPOUT, blocks
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY, depth

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.features.preference.flags import PREFERENCES


@pytest.fixture(autouse=True)
def families_of_drawn_preferences():
    drawn_preferences.known()
    yield
    drawn_preferences.unknown()


def gradients(argv):
    """For the pool."""
    drawn_preferences.known()
    return training_jobs.gradients(argv)


def train(argv):
    """For the pool."""
    drawn_preferences.known()
    return training_jobs.train(argv)


LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--num-query-groups 2"
).split()
UNTIED = ["--untie-embeddings-and-output-weights"]
MODELS = {
    "tied": ["--model-family", "preferring_gpt", *TINY],
    "untied": [
        *("--model-family", "preferring_gpt", *TINY, *LLAMA, *UNTIED),
        *("--logits-chunk-mib", "1"),
    ],
    "t5": [*FAMILIES["t5"], "--model-family", "preferring_t5", "--decoder-seq-length", "12"],
}
SAMPLE = {
    ("tp2-sp", "untied", "dpo"),
    ("tp2-pp2", "tied", "kto"),
    ("pp2-dualpipev", "untied", "orpo"),
    ("tp2-sp-pp2-interleaved", "tied", "reward"),
    ("cp2", "untied", "orpo"),
}
"""What the normal run has; `make proof` has the rest."""
SFT = ["--preference-sft-weight", "0.5"]
OPTIONS = {
    "dpo": [*SFT, "--preference-label-smoothing", "0.1"],
    "ipo": SFT,
    "simpo": SFT,
    "kto": ["--kto-desirable-weight", "1.3", "--kto-undesirable-weight", "0.7"],
}


def flags(layout, model, preference):
    parsed = parse_layout(layout)
    batch = 2 * parsed.fewest_micro_batches * parsed.data
    argv = [*MODELS[model], "--preference", preference, *OPTIONS.get(preference, [])]
    argv += [] if model == "t5" else depth(layout)
    argv += ["--micro-batch-size", "2", "--global-batch-size", str(batch)]
    if model == "t5" and layout in CONTEXT_LAYOUTS:
        argv += ["--decoder-seq-length", "16"]  # which all of them divide
    return parsed.processes, [*argv, *NO_DROPOUT]


def cells():
    for layout in (*LAYOUTS, *CONTEXT_LAYOUTS):
        for model in MODELS:
            for preference in PREFERENCES:
                if model == "t5" and preference == "reward":
                    continue  # it has no such head
                marks = () if (layout, model, preference) in SAMPLE else (pytest.mark.proof,)
                yield pytest.param(layout, model, preference, marks=marks)


@pytest.mark.parametrize(("layout", "model", "preference"), list(cells()))
def test_gradients_against_one_process(pool, layout, model, preference):
    processes, argv = flags(layout, model, preference)
    argv += ["--train-iters", "1"]
    expected = reference(*argv)
    unmoved = {each.name for each in expected.gradients if not each.values.any()}
    # It adds the same number to the rewards of all texts.
    assert unmoved <= ({"final_norm.norm.bias"} if preference == "reward" else set())
    assert difference(pool, processes, argv, flags_for(parse_layout(layout)), gradients) is None


STEPS = 6
TRAINED = {("dp2", 3, "dpo")}


def training(preference: str, stages: int):
    argv = [*MODELS["untied"], "--preference", preference, *NO_DROPOUT]
    argv += blocks("bert", stages)
    argv += ["--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", str(STEPS)]
    return [*argv, "--lr", "3e-2", "--lr-decay-style", "constant"]


def trainings():
    layouts = ("dp2", "dp4", "tp2-sp", "tp2-dp2", "pp2", "tp2-pp2", "pp2-dualpipev")
    for layout in (*layouts, "cp2", "cp2-dp2", "cp2-tp2-sp", "cp2-pp2"):
        for stage in (0, 1) if "pp" in layout else (0, 1, 2, 3):
            for preference in ("dpo", "kto", "orpo", "reward"):
                chosen = (layout, stage, preference) in TRAINED
                marks = () if chosen else (pytest.mark.proof,)
                yield pytest.param(layout, stage, preference, marks=marks)


@pytest.mark.parametrize(("layout", "stage", "preference"), list(trainings()))
def test_training_against_plain_torch(pool, layout, stage, preference):
    """Through DeepSpeed at every ZeRO stage. At stage 3 the backward pass needs the head's weight,
    which is gathered again."""
    parsed = parse_layout(layout)
    argv = training(preference, max(2, parsed.pipeline * parsed.chunks))
    flags = [*flags_for(parsed), "--zero-stage", str(stage)]
    check_training(pool, parsed.processes, argv, flags, train, 0.0)
