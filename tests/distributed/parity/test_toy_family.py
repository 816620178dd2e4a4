"""A second family, from its batches to its checkpoints, by the same checks as GPT.

An encoder with padding whose output travels between stages, an auxiliary loss on the way, a decoder
that attends to it: two files of its own, and no other knows of it.
"""

from pathlib import Path

import added_families
import numpy as np
import pytest
import training_jobs
from against_one_process import check_training, difference
from samples import sampled
from training_jobs import TINY

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.engine.environment import distributed
from megatron.features.evaluation.checkpoints import measure_samples
from megatron.model.spec import Measure
from megatron.run.run import parse_run
from megatron.training.build import build_trainer

FLAGS = [
    *TINY, "--model-family", "toy", "--num-layers", "4", "--micro-batch-size", "2",
    "--global-batch-size", "8", "--train-iters", "4", "--hidden-dropout", "0",
    "--attention-dropout", "0", "--lr-decay-style", "constant",
]  # fmt: skip
ZERO_1 = ["--zero-stage", "1"]


FOLDER = Path(__file__).parents[1] / "toy_families"


def known() -> None:
    """Puts the toy's file among those of the families, in this process."""
    added_families.add(FOLDER)


@pytest.fixture(autouse=True)
def toy_is_known():
    known()
    yield
    added_families.remove(FOLDER)


def gradients(argv):
    """For the pool."""
    known()
    return training_jobs.gradients(argv)


def train(argv):
    """For the pool."""
    known()
    return training_jobs.train(argv)


def largest(argv):
    """Numbers of each of seven samples, and their progress; for the pool."""
    known()
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        trainer = build_trainer(run, mesh)
        measure = Measure(("largest", "both"), of_samples, ends="logits", per_sample=True)
        samples = trainer.data.datasets.train
        part = type(samples)(7, samples.vocab_size, samples.part)
        done = []
        found = measure_samples(
            trainer.engine, part, trainer.data.collate, measure, 2, progress=done.append
        )
        return found, done


def of_samples(state, batch):
    largest_B2 = state.hidden.amax(-1)[:, :2]
    return {"largest": largest_B2, "both": largest_B2.sum(1, keepdim=True).expand(-1, 2)}


@pytest.mark.parametrize(
    "layout",
    sampled(
        ["tp2", "tp2-sp", "dp2", "pp2", "pp2-interleaved", "pp2-dualpipev", "tp2-pp2"],
        {"tp2-sp", "dp2", "pp2-dualpipev"}.__contains__,
    ),
)
def test_gradients_against_one_process(pool, layout):
    parsed = parse_layout(layout)
    assert difference(pool, parsed.processes, FLAGS, flags_for(parsed), gradients) is None


@pytest.mark.parametrize(
    "layout",
    sampled(
        ["dp2-zero1", "tp2-zero1", "pp2-zero1", "dp2-zero3"],
        {"pp2-zero1", "dp2-zero3"}.__contains__,
    ),
)
def test_training_through_deepspeed_against_plain_torch(pool, layout):
    parsed = parse_layout(layout)
    check_training(pool, parsed.processes, FLAGS, flags_for(parsed), train, None)


def test_a_whole_data_set_counts_every_sample_once(pool):
    """Seven samples in micro batches of two: on two ranks the last is filled up."""
    ((alone, done),) = pool.run(1, largest, [*FLAGS, *ZERO_1])
    assert done == [7] and len(set(alone["largest"][:, 0])) == 7
    np.testing.assert_allclose(alone["both"], alone["largest"].sum(1, keepdims=True) + [[0.0, 0.0]])
    for layout in ([], ["--pipeline-model-parallel-size", "2"]):
        for found, done in pool.run(2, largest, [*FLAGS, *ZERO_1, *layout]):
            assert done == [7] and found.keys() == alone.keys()
            for name in found:
                np.testing.assert_allclose(found[name], alone[name], rtol=1e-6)


def test_a_checkpoint_says_its_family(pool, tmp_path):
    save = ["--save", str(tmp_path), "--load", str(tmp_path)]
    pool.run(1, train, [*FLAGS, *save])
    assert open_checkpoint(tmp_path).model.family == "toy"
    other = [word if word != "toy" else "gpt" for word in FLAGS]
    with pytest.raises(CheckpointError, match="family 'toy', and this run trains 'gpt'; pretrain_"):
        start(other + save)
    with pytest.raises(CheckpointError, match="family 'toy'"):  # before its values are mixed in
        parse_run(None, [*other, *save, "--use-checkpoint-args"])
    added_families.remove(FOLDER)
    try:
        with pytest.raises(
            CheckpointError, match="'toy'.* known families are bert, biencoder, gpt, retro, t5"
        ):
            start(other + save)
    finally:
        known()


def start(argv):
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        build_trainer(run, mesh)
