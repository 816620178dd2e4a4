"""Sequences that grow during a run: every layout trains as one process does, and a run resumes."""

import json

import numpy as np
import pytest
from against_one_process import within
from training_jobs import TINY, train, train_plainly

from megatron.apps.parity.runs import Drift, rounding_noise

STEPS = 8
LENGTHS = [8, 8, 16, 16, 24, 24, 32, 32]
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [8, 16, 24, 32], "max_step": [2, 4, 6]},
}
FLAGS = [
    *TINY,
    *"--seq-length 32 --num-layers 4 --hidden-dropout 0 --attention-dropout 0".split(),
    *"--lr-decay-style cosine --lr-warmup-iters 2".split(),
    *f"--train-iters {STEPS} --curriculum-learning".split(),
    json.dumps(CURRICULUM),
]
PIPELINE = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "dp2-zero1": (2, "--zero-stage 1"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, PIPELINE),
    "pp2-interleaved": (2, f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"),
    "pp2-dualpipev": (2, f"{PIPELINE} --pipeline-schedule dualpipev"),
    "tp2-sp-pp2": (4, f"{PIPELINE} --tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2": (2, "--context-parallel-size 2"),
    "cp2-pp2": (4, f"{PIPELINE} --context-parallel-size 2"),
}
PROOF = {"dp2-zero1", "dp2-zero3", "pp2", "pp2-interleaved", "tp2-sp-pp2", "cp2", "cp2-pp2"}
"""Beyond the sample of every test run."""


def cases():
    for layout in LAYOUTS:
        marks = (pytest.mark.proof,) if layout in PROOF else ()
        yield pytest.param(layout, marks=marks)


@pytest.fixture(scope="module")
def reference():
    return train_plainly(FLAGS)


@pytest.fixture(scope="module")
def noise(reference):
    return rounding_noise(FLAGS, reference)


def rows(save, kind):
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def lengths_used(argv):
    """The run's record, and the shape of every micro batch that its model saw; for the pool."""
    from megatron.families import gpt

    shapes = []
    begin = gpt.begin

    def noted(model, batch):
        shapes.append(tuple(batch.tokens_BS.shape))
        return begin(model, batch)

    gpt.begin = noted
    try:
        return train(argv), shapes
    finally:
        gpt.begin = begin


def test_the_lengths_of_the_schedule_are_used(pool, tmp_path):
    """By the model, in the tokens and FLOPs that are reported; evaluations have whole samples."""
    flags = [*FLAGS, "--log-interval", "1", "--eval-interval", "2", "--eval-iters", "1"]
    _, shapes = pool.run(1, lengths_used, [*flags, "--save", str(tmp_path)])[0]
    per_step = 4
    wanted = []
    for step, length in enumerate(LENGTHS, start=1):
        wanted += [(1, length)] * per_step
        wanted += [(1, 32)] * per_step * (step % 2 == 0)  # the evaluation
    wanted += [(1, 32)] * per_step  # the test
    assert shapes == wanted
    trained = rows(tmp_path, "train")
    assert [row["seq_length"] for row in trained] == LENGTHS
    assert [row["consumed_tokens"] for row in trained] == list(np.cumsum(LENGTHS) * per_step)
    flops = [row["tflops_per_device"] * row["seconds_per_iteration"] for row in trained]
    per_token = np.divide(flops, LENGTHS)
    assert per_token[0] < per_token[2] < per_token[4] < per_token[6], "attention spans more tokens"


@pytest.mark.parametrize("layout", list(cases()))
def test_layouts_against_one_process(pool, reference, noise, layout):
    size, flags = LAYOUTS[layout]
    records = pool.run(size, train, [*FLAGS, *flags.split()])
    drift = Drift.between(records, reference)
    print(f"{layout}: loss {drift.losses.max():.1e}, norm {drift.norms.max():.1e}")
    assert within(drift, noise.bounds(reference))


@pytest.mark.parametrize(
    ("layout", "stop"),
    [
        ("pp2", 3),
        pytest.param("dp2-zero1", 4, marks=pytest.mark.proof),
        pytest.param("dp2-zero1", 3, marks=pytest.mark.proof),
        pytest.param("pp2", 4, marks=pytest.mark.proof),
    ],
)
def test_resume_is_bitwise(pool, tmp_path, layout, stop):
    """Within a length, and where it changes."""
    size, flags = LAYOUTS[layout]
    argv = [*FLAGS, *flags.split()]
    save = ["--save", str(tmp_path), "--save-interval", str(stop)]
    whole = pool.run(size, train, [*argv, *save])
    load = ["--load", str(tmp_path), "--load-tag", str(stop)]
    second = pool.run(size, train, [*argv, *load])
    for rank in range(size):
        assert second[rank].losses == whole[rank].losses[stop:]
        assert second[rank].state.keys() == whole[rank].state.keys()
        for key, values in whole[rank].state.items():
            assert np.array_equal(second[rank].state[key], values), key


TOKENS = sum(LENGTHS) * 4


@pytest.mark.parametrize(
    ("flags", "warmup"),
    [
        # The iterations size the data; their warm-up ends after two steps of 4 x 8 tokens.
        (f"--train-iters 50 --lr-warmup-iters 2 --lr-decay-tokens {TOKENS}", 64),
        pytest.param("--lr-warmup-tokens 100", 100, marks=pytest.mark.proof),
    ],
)
def test_length_in_tokens(pool, tmp_path, flags, warmup):
    """A run of tokens ends when its real ones are consumed; rates follow them across a resume."""
    whole = TOKENS
    at = FLAGS.index("--train-iters")
    base = [*FLAGS[:at], *FLAGS[at + 2 :]]
    del base[base.index("--lr-warmup-iters") : base.index("--lr-warmup-iters") + 2]
    base += ["--train-tokens", str(whole), *flags.split(), "--log-interval", "1"]
    save = ["--save", str(tmp_path)]
    pool.run(1, train, [*base, *save, "--exit-interval", "5"])
    last = pool.run(2, train, [*base, *save, "--load", str(tmp_path)])
    assert last[0].iteration == STEPS
    found = rows(tmp_path, "train")
    assert [row["consumed_tokens"] for row in found] == list(np.cumsum(LENGTHS) * 4)
    before = np.concatenate([[0], np.cumsum(LENGTHS)[:-1] * 4])
    share = (before[4:] - warmup) / (whole - warmup)
    wanted = 1e-2 * 0.5 * (np.cos(np.pi * share) + 1)
    np.testing.assert_allclose([row["learning_rate"] for row in found[4:]], wanted, rtol=1e-9)
    assert found[1]["learning_rate"] == pytest.approx(1e-2 * 32 / warmup)


BERT = [*FLAGS, *"--model-family bert --short-seq-prob 0.5 --max-position-embeddings 32".split()]
"""The same lengths; every sample of BERT has padding or is cut."""
SAMPLING = {
    "enabled": True,
    "data_sampling": {
        "enabled": True,
        "curriculum_learning": {
            "enabled": True,
            "curriculum_metrics": {
                "seqlen": {
                    "difficulty_type": "value",
                    "clustering_type": "single_cluster",
                    "min_difficulty": 8,
                    "max_difficulty": 32,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
                }
            },
        },
    },
}
"""Samples of all lengths, whose padding is left out."""
DRAWN = [*BERT[: BERT.index("--curriculum-learning")], *BERT[BERT.index("--model-family") :],
         "--data-efficiency", json.dumps(SAMPLING)]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        pytest.param(flags, layout, marks=marks, id=f"{name}-{layout}")
        for flags, name, layout, marks in (
            (BERT, "cut", "pp2", ()),
            (BERT, "cut", "dp2-zero1", pytest.mark.proof),
            (BERT, "cut", "tp2-sp-pp2", pytest.mark.proof),
            (DRAWN, "unpadded", "pp2", pytest.mark.proof),
            (DRAWN, "unpadded", "dp2-zero3", pytest.mark.proof),
            (DRAWN, "unpadded", "tp2-sp", pytest.mark.proof),
        )
    ],
)
def test_bert_against_one_process(pool, flags, layout):
    """Samples that are cut, and micro batches without columns of padding."""
    reference = train_plainly(flags)
    size, more = LAYOUTS[layout]
    records = pool.run(size, train, [*flags, *more.split()])
    drift = Drift.between(records, reference)
    assert within(drift, rounding_noise(flags, reference).bounds(reference))


@pytest.mark.proof
def test_padding_that_is_left_out_changes_no_loss():
    """Samples in the same order, with and without the columns of padding."""
    lengths = json.loads(json.dumps(SAMPLING))
    metrics = lengths["data_sampling"]["curriculum_learning"]["curriculum_metrics"]
    metrics["seqlen_truncate"] = metrics["seqlen"] | {"min_difficulty": 32}
    whole = [*DRAWN[:-1], json.dumps(lengths)]
    reference = train_plainly(DRAWN)
    drift = Drift.between([train_plainly(whole)], reference)
    assert within(drift, rounding_noise(DRAWN, reference).bounds(reference))
