"""Scores of text on every layout, from an evaluator and from an engine in training, against plain
torch in float64."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from family_models import FAMILIES, NO_DROPOUT, RELATIVE
from training_jobs import TINY, train

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.source import locate_checkpoint
from megatron.data.texts import ScoredText
from megatron.engine.environment import distributed, training_device
from megatron.engine.loading import load_checkpoint
from megatron.families import build_model, family_of, spec_of
from megatron.features.evaluation.checkpoints import measure_texts
from megatron.features.evaluation.evaluator import build_evaluator
from megatron.model.layer_list import initialise
from megatron.run.run import parse_run
from megatron.training.build import build_trainer

FLAGS = {
    "gpt": [*TINY, "--num-layers", "4", "--max-position-embeddings", "20", *NO_DROPOUT],
    "t5": [*FAMILIES["t5"], "--global-batch-size", "8", *NO_DROPOUT],
    "t5-relative": [*FAMILIES["t5"], *RELATIVE, "--global-batch-size", "8", *NO_DROPOUT],
}
WIDE = ["--init-method-std", "0.3", "--train-iters", "1"]
"""Weights whose predictions differ."""


def texts(count: int = 11) -> list[ScoredText]:
    """Of different lengths, up to the longest, one of one token each."""
    draw = np.random.default_rng(0)
    sizes = [(1, 1), (8, 8), *zip(*draw.integers(1, 9, (2, count - 2)), strict=True)]
    return [ScoredText(*(draw.integers(0, 99, n) for n in pair)) for pair in sizes]


class WithStart:
    """The tokenizer of the flags, with the first token of a decoder's input."""

    pad = 0


def scores(model: str, argv: list[str], micro_batch_size: int, trained: bool = False):
    """For the pool."""
    run = parse_run(None, [*FLAGS[model], *WIDE, *argv])
    with distributed(run.config.parallel) as mesh:
        if trained:
            engine = build_trainer(run, mesh).engine
        else:
            spec = spec_of(run.config.model, run.config.parallel)
            engine = build_evaluator(run.config, spec, mesh, training_device())
            engine.initialise()
        return measure_texts(engine, WithStart(), texts(), micro_batch_size)


@cache
def plain_scores(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Text by text, unpadded, on one process: log-softmax and argmax of all logits, in float64."""
    run = parse_run(None, [*FLAGS[model], *WIDE])
    stack = build_model(run.config.model)
    for name, param in stack.canonical_parameters():
        initialise(name, param, run.config.training.seed)
    stack.double().eval()
    family, found = family_of(run.config.model.family), []
    for text in texts():
        batch = family.scored_batch(run.config, WithStart(), [text])
        begin = family.spec(run.config.model, run.config.parallel).begin(batch)
        with torch.no_grad():
            logits = stack(begin.changed(targets=None)).hidden[
                0, :, : run.config.model.vocabulary.size
            ]
        logits = logits[-len(text.continuation) :]
        labels = torch.from_numpy(text.continuation)
        assert logits.dtype == torch.float64 and len(logits) == len(labels)
        log_probs = logits.log_softmax(-1).gather(1, labels[:, None])
        found.append((float(log_probs.sum()), int((logits.argmax(-1) == labels).sum())))
    log_prob, correct = zip(*found, strict=True)
    return np.array(log_prob), np.array(correct)


def agree(found, model: str, tolerance: float = 1e-5) -> None:
    log_prob, correct = plain_scores(model)
    for rank in found:
        np.testing.assert_allclose(rank["log_prob"], log_prob, rtol=tolerance)
        np.testing.assert_array_equal(rank["correct"], correct)


LAYOUTS = [
    *("dp1", "tp2", "tp2-sp", "pp2", "dp2", "tp2-dp2", "tp2-sp-pp2", "pp2-interleaved"),
    *("cp2", "cp2-dp2", "cp2-tp2-sp", "cp2-pp2", "cp4-a2a+p2p"),
]
QUICK = {("gpt", "tp2-sp", 3), ("t5", "pp2", 3), ("gpt", "dp2-zero3", 3)}
"""Those of the default suite."""


def cases(layouts: list[str], sizes: list[int]):
    """Every model on every layout with every size of a micro batch."""
    return [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.proof)
        for case in itertools.product(FLAGS, layouts, sizes)
    ]


@pytest.mark.parametrize(("model", "layout", "size"), cases(LAYOUTS, [1, 3]))
def test_scores_are_those_of_plain_torch(pool, model, layout, size):
    parsed = parse_layout(layout)
    agree(pool.run(parsed.processes, scores, model, flags_for(parsed), size), model)


@pytest.mark.parametrize(
    ("model", "layout", "size"),
    cases(["dp2-zero3", "tp2-sp-dp2-zero1", "pp2-zero1", "cp2-zero3"], [3]),
)
def test_scores_of_an_engine_in_training(pool, model, layout, size):
    parsed = parse_layout(layout)
    agree(pool.run(parsed.processes, scores, model, flags_for(parsed), size, True), model)


def loaded(argv: list[str], folder: str):
    """Scores by a checkpoint, and the dtypes of the weights; for the pool."""
    run = parse_run(None, [*FLAGS["gpt"], *WIDE, *argv])
    with distributed(run.config.parallel) as mesh:
        spec = spec_of(run.config.model, run.config.parallel)
        engine = build_evaluator(run.config, spec, mesh, training_device())
        load_checkpoint(engine, locate_checkpoint(folder), weights_only=True)
        assert not any(param.requires_grad for param in engine.names)
        dtypes = {param.dtype for param in engine.model.parameters()}
        return measure_texts(engine, WithStart(), texts(), 3), dtypes


@pytest.mark.proof
@pytest.mark.parametrize(
    ("layout", "precision", "dtype", "tolerance"),
    [
        ("tp2-pp2", [], torch.float32, 1e-5),
        ("cp2-tp2", [], torch.float32, 1e-5),
        ("dp2", ["--bf16"], torch.bfloat16, 0.05),
        ("pp2-interleaved", ["--bf16"], torch.bfloat16, 0.05),
        ("tp2", ["--fp16"], torch.float32, 1e-5),  # on a CPU
    ],
)
def test_a_checkpoint_of_another_layout(pool, tmp_path, layout, precision, dtype, tolerance):
    """Initial weights, saved by two ranks at stage 3 after a step that changes nothing."""
    still = ["--lr", "1e-12", "--weight-decay", "0", "--zero-stage", "3", "--save", str(tmp_path)]
    pool.run(2, train, [*FLAGS["gpt"], *WIDE, *still])
    parsed = parse_layout(layout)
    log_prob, _ = plain_scores("gpt")
    argv = [*flags_for(parsed), *precision]
    for found, dtypes in pool.run(parsed.processes, loaded, argv, str(tmp_path)):
        assert dtypes == {dtype}
        np.testing.assert_allclose(found["log_prob"], log_prob, rtol=tolerance)
