"""Checkpoints of models with heads for labelled text, and of others loaded without their heads."""

from functools import cache

import labelled_texts
import numpy as np
import pytest
import torch
from family_models import FAMILIES, NO_DROPOUT

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import locate_checkpoint
from megatron.engine.build import build_engine
from megatron.engine.environment import distributed, training_device
from megatron.engine.loading import load_checkpoint
from megatron.engine.state import owned_slices
from megatron.families import spec_of
from megatron.parallel.random import generator
from megatron.parallel.shard import init_of, shard_of
from megatron.run.run import parse_run

STOP, END = 2, 4
RUN = [*f"--num-layers 4 --global-batch-size 8 --train-iters {END}".split(), *NO_DROPOUT]
HEADS = ("classification", "regression", "multiple_choice", "span")
LAYOUTS = (
    "dp1-zero1 tp2-sp-zero1 pp2-zero1 dp2-zero2 dp2-zero3 tp2-sp-pp2-zero1 pp2-dualpipev-zero1"
).split()


@pytest.fixture(autouse=True)
def families_with_heads():
    labelled_texts.known()
    yield
    labelled_texts.unknown()


def trained(argv):
    """The losses of the steps of a run; for the pool."""
    labelled_texts.known()
    record, run = RunRecord(), parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        watched_trainer(run, mesh, record.add).fit()
    return record.losses


def loaded(argv, folder, weights_only=True):
    """What a rank holds after loading, what belongs to the checkpoint and what is as it is drawn,
    and the notes, or the error; for the pool."""
    labelled_texts.known()
    run = parse_run(None, argv)
    config = run.config
    with distributed(config.parallel) as mesh:
        spec = spec_of(config.model, config.parallel)
        engine = build_engine(config, run.content, spec, mesh, training_device())
        try:
            source = load_checkpoint(engine, locate_checkpoint(folder), weights_only)
        except CheckpointError as error:
            return str(error)
        read, drawn = set(), set()
        for own in owned_slices(engine):
            values, param = own.get("weight").float(), own.param
            shape = shard_of(param).canonical_shape
            if own.name in source.names() and source.shape(own.name) == shape:
                whole = source.tensor(own.name)
                read.add(own.name)
            else:
                whole = init_of(param).draw(shape, generator(config.training.seed, own.name))
                drawn.add(own.name)
            share, first = shard_of(param).cut(whole, mesh.coordinates).flatten(), own.slice.start
            assert torch.equal(values.flatten(), share[first : first + own.count]), own.name
        engine.close()
    return read, drawn, source.notes


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """The folder of a checkpoint of a family, made once."""

    @cache
    def save(family, layout, *more):
        folder = tmp_path_factory.mktemp("save")
        parsed = parse_layout(layout)
        argv = [*FAMILIES[family], *RUN, *more, *flags_for(parsed), "--exit-interval", str(STOP)]
        pool.run(parsed.processes, trained, [*argv, "--save", str(folder)])
        return folder

    return save


def pairs():
    for number, family in enumerate(HEADS):
        for row, source in enumerate(LAYOUTS):
            target = LAYOUTS[(row + 2 + number) % len(LAYOUTS)]
            yield family, source, target


@pytest.mark.proof
@pytest.mark.parametrize(("family", "source", "target"), list(pairs()))
def test_continues_in_any_layout(family, source, target, pool, saved):
    """As in one process. After a step Adam has made numbers of the rounding of gradients that are
    zero, as that of a score added to all places is."""
    parsed = parse_layout(target)
    argv = [*FAMILIES[family], *RUN, "--load", str(saved(family, source))]
    expected = pool.run(1, trained, [*argv, "--zero-stage", "1"])[0]
    losses = pool.run(parsed.processes, trained, [*argv, *flags_for(parsed)])[0]
    assert len(losses) == END - STOP
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


BOTH, LM = (), ("--bert-no-binary-head", "--num-tokentypes", "2")
HEAD = {"binary_head.weight", "binary_head.bias", "lm_head.dense.weight", "lm_head.dense.bias",
        "lm_head.norm.weight", "lm_head.norm.bias", "embedding.word_embeddings.bias"}  # fmt: skip
POOLER = {"pooler.dense.weight", "pooler.dense.bias"}


def of(name):
    return {f"{name}.weight", f"{name}.bias"}


LOADED = {
    "both to classification": ("bert", BOTH, "classification", of("classification_head")),
    "lm to choice": ("bert", LM, "multiple_choice", POOLER | of("multichoice_head")),
    "both to span": ("bert", BOTH, "span", of("span_head")),
    "labels to a number": ("classification", (), "regression", of("classification_head")),
    "labels to span": ("classification", (), "span", of("span_head")),
    "span to choice": ("span", (), "multiple_choice", POOLER | of("multichoice_head")),
    "labels to both": ("classification", (), "bert", HEAD),
}
"""Family of the checkpoint, its flags, family of the run, and what is initialised."""
SAMPLE = ("both to classification", "labels to a number", "labels to both")
PLACES = {
    "lm to choice": "dp2-zero3", "labels to a number": "tp2-sp-zero1", "labels to both": "pp2-zero1"
}  # fmt: skip


def loads():
    for case in LOADED:
        yield pytest.param(case, marks=() if case in SAMPLE else (pytest.mark.proof,))


@pytest.mark.parametrize("case", list(loads()))
def test_another_head(case, pool, saved):
    source, more, target, fresh = LOADED[case]
    layout = parse_layout(PLACES.get(case, "dp1-zero1"))
    folder = saved(source, "dp1-zero1", *more)
    argv = [*FAMILIES[target], *RUN, *flags_for(layout)]
    results = pool.run(layout.processes, loaded, argv, str(folder))
    assert set().union(*(drawn for _, drawn, _ in results)) == fresh
    ((line,),) = {notes for _, _, notes in results}
    assert all(name in line.partition("left out")[0] for name in fresh)
    left_out = set(line.partition("left out ")[2].split(", "))
    stored = set(CheckpointReader(locate_checkpoint(folder).folder).names())
    assert left_out == stored - set().union(*(read for read, _, _ in results))


def test_what_is_refused(pool, saved):
    folder = str(saved("classification", "dp1-zero1"))
    argv = [*FAMILIES["bert"], *RUN]
    (refusal,) = pool.run(1, loaded, argv, folder, False)
    assert (
        "contains a model with the head classification for 3 labels, and this run needs the head "
        "lm: it cannot be continued; --finetune starts from its weights" in refusal
    )
    (refusal,) = pool.run(1, loaded, [*argv, "--num-layers", "3"], folder)
    assert "different architecture: num_layers is 4 in the checkpoint and 3" in refusal
    (refusal,) = pool.run(1, loaded, [*argv, "--num-tokentypes", "0"], folder)
    assert "num_tokentypes is null in the checkpoint and 0" in refusal
