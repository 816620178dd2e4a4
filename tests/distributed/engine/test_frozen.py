"""Parameters without gradients: at every ZeRO stage and in pipelines they stay as they are, have no
state in the optimizer and no place in checkpoints, and the others train as in plain torch."""

import dataclasses
import functools

import numpy as np
import pytest
from samples import sampled
from training_jobs import TINY

from megatron.apps.parity.runs import PlainTraining, RunRecord, watched_trainer
from megatron.checkpoint.reader import CheckpointReader
from megatron.engine.environment import distributed
from megatron.engine.state import owned_slices
from megatron.families import trained_spec
from megatron.run.run import parse_run
from megatron.training import build as training_build

STEPS = 3
FLAGS = [*TINY, *f"--train-iters {STEPS} --hidden-dropout 0 --attention-dropout 0".split()]
FLAGS += "--num-layers 4 --num-query-groups 2 --init-method-std 0.2 --lr 1e-3".split()
TRAINED = "mlp.up"
"""In the names of what is trained."""
FP16 = "--zero-stage 1 --fp16 --initial-loss-scale 65536"
LAYOUTS = {
    "zero0": (1, ""),
    "zero0-fp16": (1, FP16.replace("1", "0", 1)),
    "zero1-dp2": (2, "--zero-stage 1"),
    "zero1-dp2-bf16-sums-fp32": (
        2,
        "--zero-stage 1 --bf16 --accumulate-allreduce-grads-in-fp32",
    ),
    "zero2-dp2-bf16": (2, "--zero-stage 2 --bf16"),
    "zero1-fp16": (1, FP16),
    "zero3-dp2": (2, "--zero-stage 3"),
    "zero3-dp2-bf16": (2, "--zero-stage 3 --bf16"),
    "zero0-sgd": (1, "--optimizer sgd"),
    "zero1-dp2-states": (
        2,
        "--zero-stage 1 --bf16 --use-precision-aware-optimizer --exp-avg-dtype int8",
    ),
    "tp4-sp": (4, "--tensor-model-parallel-size 4 --sequence-parallel --zero-stage 1"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --zero-stage 1",
    ),
    "pp2-dualpipev-bf16": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipev --zero-stage 1 --bf16",
    ),
    "pp2-dp2-fp16": (
        4,
        f"--pipeline-model-parallel-size 2 {FP16}",
    ),
}
SAMPLE = {"zero3-dp2", "pp2-dualpipev-bf16"}


def frozen_spec(config):
    """The model of a run, of which only some parameters are trained."""
    spec = trained_spec(config)

    def layers(tp):
        return [dataclasses.replace(layer, build=frozen(layer.build)) for layer in spec.layers(tp)]

    return dataclasses.replace(spec, layers=layers)


def frozen(build):
    def frozen_build():
        module = build()
        for name, param in module.named_parameters():
            param.requires_grad_(TRAINED in name)
        return module

    return frozen_build


def run(argv):
    """Losses, and the names of the parameters that changed, that had gradients, and that the
    optimizer has; for the pool."""
    record, parsed, with_grads = RunRecord(), parse_run(None, argv), set()
    with distributed(parsed.config.parallel) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_build, "trained_spec", frozen_spec)
        trainer = watched_trainer(parsed, mesh, record.add)
        engine = trainer.engine
        update = engine.update

        def watched():
            with_grads.update(name for param, name in engine.names.items() if has_gradient(param))
            return update()

        patch.setattr(engine, "update", watched)
        before = held(engine)
        trainer.fit()
        changed = {
            name
            for (name, first), (_, last) in zip(before, held(engine), strict=True)
            if not np.array_equal(first, last)
        }
        states = {own.name for own in owned_slices(engine)}
        return record.losses, changed, with_grads, states


def has_gradient(param):
    return any(
        getattr(param, name, None) is not None for name in ("grad", "grad_accum", "_hp_grad")
    )


def held(engine):
    """The weights that this rank computes with, at ZeRO 3 its partitions."""
    found = []
    for param, name in engine.names.items():
        values = param.ds_tensor if engine.stage == 3 else param
        found.append((name, values.detach().float().numpy().copy()))
    return found


@functools.cache
def plain(sgd):
    """Losses of the same training in plain torch."""
    training = PlainTraining([*FLAGS, *("--optimizer", "sgd") * sgd])
    for name, param in training.params.items():
        param.requires_grad_(TRAINED in name)
    return [training.step()[0] for _ in range(STEPS)]


@pytest.mark.parametrize("name", sampled(LAYOUTS, lambda name: name in SAMPLE))
def test_only_the_others_are_trained(pool, tmp_path, name):
    size, layout = LAYOUTS[name]
    results = pool.run(size, run, [*FLAGS, "--save", str(tmp_path), *layout.split()])
    for losses, *found in results:
        half = "--bf16" in layout or "--fp16" in layout
        np.testing.assert_allclose(losses, plain("sgd" in name), rtol=5e-3 if half else 1e-5)
        for names in found:
            assert all(TRAINED in each for each in names), names
        changed, _, states = found
        assert changed
        assert states
    source = CheckpointReader(CheckpointReader.locate(tmp_path, None))
    assert all(TRAINED in each for each in source.names())
