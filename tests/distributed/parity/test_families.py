"""BERT, its heads for labelled text, and T5: every gradient of every layout against one process,
and training through the engine.

As test_gradients.py and test_training.py do it for GPT. T5's decoder also starts at each rank of a
pipeline (``--pipeline-model-parallel-split-rank``).
"""

import dataclasses

import labelled_texts
import pytest
import torch
import training_jobs
from against_one_process import check_training, layers_of, reference
from family_models import ENCODER_DROPOUT, FAMILIES, MODELS, NO_DROPOUT, blocks, flags, split_ranks
from samples import sampled
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS

from megatron.apps.parity.gradients import first_difference
from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.conversion.commands import to_hf
from megatron.formats.huggingface.source import HuggingFaceFolder


@pytest.fixture(autouse=True)
def families_with_heads():
    labelled_texts.known()
    yield
    labelled_texts.unknown()


def gradients(argv):
    """For the pool."""
    labelled_texts.known()
    return training_jobs.gradients(argv)


def train(argv):
    """For the pool."""
    labelled_texts.known()
    return training_jobs.train(argv)


ALL = (*LAYOUTS, "pp2-interleaved-v4", "tp2-pp2-interleaved-v4", *CONTEXT_LAYOUTS)
SAMPLE = {
    "bert": (
        "tp2-sp/pre-norm tp2-pp2/untied pp2-interleaved/recompute-full cp2/next-sentence"
    ).split(),
    "biencoder": "tp2-sp-pp2/projected pp2-dualpipev/shared".split(),
    "classification": [],
    "regression": [],
    "multiple_choice": ["pp2-dualpipev/pre-norm"],
    "span": ["tp2-sp/pre-norm"],
    "t5": (
        "tp2-sp/relative-untied tp2-sp-pp2-interleaved/recompute-full pp2-dualpipev/uneven "
        "cp2-pp2/relative"
    ).split(),
    "retro": "tp2-sp-pp2/recompute-full pp2-dualpipev/untied".split(),
}
"""What the normal run has; `make proof` has the rest."""


DIVIDED_OTHERWISE = ("partition", "uneven")
"""Models of T5 whose decoder cannot start at each rank, or starts where another flag says."""


def largest(records, expected) -> float:
    """The largest difference of a gradient, relative to what is allowed to be 1e-12."""
    whole = {g.name: g for g in expected.gradients}
    top = max(float(g.values.abs().max()) for g in expected.gradients)
    found = 0.0
    for record in records:
        for own in record.gradients:
            reference = whole[own.name]
            values = reference.shard.join([reference.values])
            share = own.shard.cut(values, record.coordinates)
            scale = max(float(values.abs().max()), 1e-3 * top)
            found = max(found, float((own.values - share).abs().max()) / scale)
    return found


VANISHING = {
    "biencoder": ("context_model.final_norm.norm.bias", "context_model.head.projection.bias"),
    "multiple_choice": ("multichoice_head.bias",),
    "span": ("span_head.bias", "final_norm.norm.bias"),
}
"""Parameters that add the same number to the scores of all choices, places or contexts, and so have
no effect."""


def without_vanishing(record, family):
    """The record without gradients that are zero but for rounding, which are checked here."""
    names = VANISHING.get(family, ())
    for each in record.gradients:
        assert each.name not in names or each.values.abs().max() < 1e-14
    kept = [each for each in record.gradients if each.name not in names]
    return dataclasses.replace(record, gradients=kept)


def cells():
    """Family, layout, rank where a decoder starts (0: as it is derived), model, micro batches: once
    or twice the fewest, in turn."""
    for family, models in MODELS.items():
        for number, layout in enumerate(ALL):
            if family in ("retro", "biencoder") and layout in CONTEXT_LAYOUTS:
                continue
            if family == "biencoder" and parse_layout(layout).data > 1:
                continue  # the loss is that of all ranks' samples: see test_biencoder.py
            splits = [0, *split_ranks(parse_layout(layout))] if family == "t5" else [0]
            for place, model in enumerate(models):
                for split in splits:
                    if split and model in DIVIDED_OTHERWISE:
                        continue
                    name = f"{layout}-split{split}" if split else layout
                    marks = () if f"{name}/{model}" in SAMPLE[family] else (pytest.mark.proof,)
                    times = 1 + (number + place + split) % 2
                    case = f"{family}-{name}-{model}"
                    yield pytest.param(family, layout, split, model, times, marks=marks, id=case)


@pytest.mark.parametrize(("family", "layout", "split", "model", "times"), list(cells()))
def test_gradients_against_one_process(pool, family, layout, split, model, times):
    size, argv = flags(family, model, layout, times)
    argv += ["--train-iters", "1", *NO_DROPOUT]
    expected = without_vanishing(reference(*argv), family)
    more = ["--pipeline-model-parallel-split-rank", str(split)] if split else []
    records = pool.run(size, gradients, [*argv, *flags_for(parse_layout(layout)), *more])
    records = [without_vanishing(record, family) for record in records]
    assert first_difference(records, expected, layers_of(*argv)) is None
    print(f"largest difference: {family} {largest(records, expected):.1e}")


DROPOUT = {
    "all": [],
    "hidden": ["--attention-dropout", "0"],
    "none": NO_DROPOUT,
}
TRAINED = {
    "bert": ("pre-norm", "post-norm"),
    "t5": ("learned", "relative"),
    "retro": ("learned",),
    "classification": ("post-norm",),
    "regression": ("lm-only",),
    "multiple_choice": ("pre-norm",),
    "span": ("pre-norm",),
}
TRAINED_SAMPLE = {
    "t5-pp2-zero1-relative",
}
STEPS = 8
FALL = {"classification": 0.04, "multiple_choice": 0.0}
"""Fall of the loss of families whose first loss is small, the logarithm of three."""


def training(family: str, model: str, stages: int, dropout: str):
    argv = [*FAMILIES[family], *MODELS[family][model], *DROPOUT[dropout]]
    if (family, dropout) == ("retro", "all"):
        argv += ENCODER_DROPOUT.format(0.1).split()
    argv += blocks(family, stages)
    argv += ["--global-batch-size", "8", "--train-iters", str(STEPS), "--lr-warmup-iters", "3"]
    return [*argv, "--lr-decay-style", "cosine"]


def trainings():
    for family, models in TRAINED.items():
        for layout in (*LAYOUTS, *([] if family == "retro" else CONTEXT_LAYOUTS)):
            parsed = parse_layout(layout)
            if 2 * parsed.fewest_micro_batches * parsed.data > 8:
                continue
            for stage in (0, 1) if parsed.pipeline > 1 else (0, 1, 2, 3):
                for model in models:
                    chosen = f"{family}-{layout}-zero{stage}-{model}" in TRAINED_SAMPLE
                    marks = () if chosen else (pytest.mark.proof,)
                    yield pytest.param(family, f"{layout}-zero{stage}", model, marks=marks)


@pytest.mark.parametrize(("family", "layout", "model"), list(trainings()))
def test_training_against_plain_torch(pool, family, layout, model):
    parsed = parse_layout(layout)
    stages = max(2, parsed.pipeline * parsed.chunks)
    argv = training(family, model, stages, parsed.dropout)
    fall = FALL.get(family, 0.1)
    check_training(pool, parsed.processes, argv, flags_for(parsed), train, fall)


EXPORTED = [
    (layout, family, model)
    for layout in ("tp2-zero1", "pp2-zero1", "dp2-zero3")
    for family, models in (("bert", ("modernbert",)), ("t5", ("umt5", "bart", "mbart")))
    for model in models
]


@pytest.mark.parametrize(
    ("layout", "family", "model"),
    sampled(EXPORTED, lambda each: each == ("dp2-zero3", "t5", "bart")),
)
def test_what_ranks_have_trained_is_exported(pool, tmp_path, capsys, layout, family, model):
    """The exporter compares logits with transformers."""
    parsed = parse_layout(layout)
    argv = [*FAMILIES[family], *MODELS[family][model], *NO_DROPOUT, *blocks(family, 4)]
    argv += ["--global-batch-size", "8", "--train-iters", "2", "--save", str(tmp_path / "ours")]
    pool.run(parsed.processes, train, [*argv, *flags_for(parsed)])
    to_hf(["--load", str(tmp_path / "ours"), "--output", str(tmp_path / "theirs")])
    assert "tokens agree" in capsys.readouterr().out
    read = HuggingFaceFolder(tmp_path / "theirs")
    assert read.architecture.model_type == model
    trained = open_checkpoint(tmp_path / "ours")
    assert {*trained.names()} == {*read.names()}
    assert all(torch.equal(trained.tensor(name), read.tensor(name)) for name in read.names())
