"""A Retro that starts from the weights of a GPT, on any layout."""

import numpy as np
import pytest
import torch
from family_models import ENCODER_DROPOUT, NO_DROPOUT
from training_jobs import TINY

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint, open_checkpoint
from megatron.engine.build import build_engine
from megatron.engine.environment import distributed, training_device
from megatron.engine.loading import load_checkpoint
from megatron.engine.state import owned_slices
from megatron.families import build_model, spec_of
from megatron.formats.huggingface.export import write_model
from megatron.parallel.random import generator
from megatron.parallel.shard import init_of, shard_of
from megatron.run.run import parse_run
from megatron.training import resume

STEPS = 3
GPT = [*TINY, *"--num-layers 4 --global-batch-size 8".split(), *NO_DROPOUT]
GPT += ["--train-iters", str(STEPS)]
RETRO = [
    *GPT,
    *"--model-family retro --retro-gpt-chunk-length 4 --retro-cross-attention-layers 2 4".split(),
    *ENCODER_DROPOUT.format(0).split(),
]
STARTED = ["--finetune", "--no-load-optim"]


def trained(argv):
    """The losses of the steps of a run; for the pool."""
    record, run = RunRecord(), parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        watched_trainer(run, mesh, record.add).fit()
    return record.losses


def loaded(argv, folder):
    """The names of what a rank has of a checkpoint, and of what is as it is drawn, and the notes;
    for the pool."""
    run = parse_run(None, argv)
    config = run.config
    with distributed(config.parallel) as mesh:
        spec = spec_of(config.model, config.parallel)
        engine = build_engine(config, run.content, spec, mesh, training_device())
        source = load_checkpoint(engine, locate_checkpoint(folder), weights_only=True)
        read, drawn = set(), set()
        for own in owned_slices(engine):
            param = own.param
            if own.name in source.names():
                whole = source.tensor(own.name)
                read.add(own.name)
            else:
                shape = shard_of(param).canonical_shape
                whole = init_of(param).draw(shape, generator(config.training.seed, own.name))
                drawn.add(own.name)
            share, first = shard_of(param).cut(whole, mesh.coordinates).flatten(), own.slice.start
            expected = share[first : first + own.count]
            assert torch.equal(own.get("weight").float().flatten(), expected), own.name
        engine.close()
    return read, drawn, source.notes


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A GPT's checkpoint."""
    folder = tmp_path_factory.mktemp("gpt")
    flags = ["--tensor-model-parallel-size", "2", "--save", str(folder)]
    pool.run(2, trained, [*GPT, *flags])
    return folder


@pytest.mark.parametrize(
    "layout",
    [
        "tp2-sp-pp2-zero1",
        *(
            pytest.param(name, marks=pytest.mark.proof)
            for name in "dp1-zero0 dp2-zero3 pp2-dualpipev-zero1 tp4-sp-zero1".split()
        ),
    ],
)
@pytest.mark.parametrize("form", ["own", pytest.param("hf", marks=pytest.mark.proof)])
def test_shared_weights_are_the_gpts(pool, saved, tmp_path, layout, form):
    """And the others those of a run from scratch."""
    parsed, folder = parse_layout(layout), saved
    if form == "hf":
        folder = tmp_path / "hf"
        folder.mkdir()
        write_model(open_checkpoint(saved), folder, "float32", 10**9)
    results = pool.run(parsed.processes, loaded, [*RETRO, *flags_for(parsed)], str(folder))
    read = set().union(*(result[0] for result in results))
    drawn = set().union(*(result[1] for result in results))
    assert read == set(open_checkpoint(saved).names())
    retro = build_model(parse_run(None, RETRO).config.model)
    assert read | drawn == {name for name, _ in retro.canonical_parameters()}
    across = ("cross_attention", "cross_attention_norm")
    added = {"layers.1.encoder", *(f"layers.{n}.{part}" for n in (1, 3) for part in across)}
    assert {".".join(name.split(".")[:3]) for name in drawn} == added
    assert "initialised what retro adds in layers.1, layers.3" in results[0][2][-1]


def test_with_a_closed_gate_it_is_the_gpt(pool, saved):
    """The first loss of a run with a gate of 0 is the GPT's, and with 0.01 close to it."""
    start = ["--load", str(saved), *STARTED, "--seed", "5", "--lr", "1e-3"]
    gpt = pool.run(1, trained, [*GPT, *start])[0]
    args = [*RETRO, "--use-checkpoint-args", *start]
    closed = pool.run(1, trained, [*args, "--retro-attention-gate", "0"])[0]
    ajar = pool.run(1, trained, [*args, "--retro-attention-gate", "0.01"])[0]
    np.testing.assert_allclose(closed[0], gpt[0], rtol=1e-6)
    assert closed[0] != ajar[0]
    np.testing.assert_allclose(ajar[0], gpt[0], rtol=1e-3)


def test_without_a_retriever_the_program_continues_a_gpt(saved):
    """With the values of its checkpoint, which has no retriever."""
    argv = [*GPT, "--load", str(saved), "--use-checkpoint-args"]
    run = parse_run(None, argv, "retro")
    assert run.config.model.family == "gpt"
    origin = resume.locate(run.config)
    assert origin is not None and origin.continues
    retro = [*argv, "--retro-add-retriever", "--retro-gpt-chunk-length", "4"]
    with pytest.raises(CheckpointError, match="--finetune --no-load-optim starts a retro from"):
        resume.locate(parse_run(None, retro, "retro").config)


def test_what_is_refused(saved):
    load = ["--load", str(saved)]
    with pytest.raises(CheckpointError, match="--finetune --no-load-optim starts a retro from its"):
        resume.locate(parse_run(None, [*RETRO, *load]).config)
    resume.locate(parse_run(None, [*RETRO, *load, *STARTED]).config)
    with pytest.raises(CheckpointError, match="of the family 'gpt', and this run trains 'bert'"):
        resume.locate(parse_run(None, [*GPT, "--model-family", "bert", *load, *STARTED]).config)
