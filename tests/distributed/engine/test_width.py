"""muP trains alike in every layout, changes nothing at the base's size, and resumes bitwise."""

import numpy as np
import pytest
import torch
from training_jobs import TINY, depth, train, train_plainly

from megatron.apps.parity.gradients import average_by, average_gradients
from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.runs import PlainTraining, RunRecord, watched_trainer
from megatron.checkpoint.source import locate_checkpoint
from megatron.engine.environment import deterministic_kernels, distributed
from megatron.parallel.shard import shard_of
from megatron.run.run import parse_run

PLAIN = [*TINY, *"--train-iters 4 --hidden-dropout 0 --attention-dropout 0".split()]
AT_BASE = "--use-mup --mup-base-head-dim 8".split()
WIDE = [*AT_BASE, *"--mup-base-hidden-size 8 --mup-base-num-layers 2".split()]
MUON = "--optimizer muon --muon-nesterov --muon-scale-mode unit_rms_norm --lr 2e-3".split()
LAYOUTS = ("tp2", "pp2", "dp2-zero1", "dp2-zero2", "dp2-zero3", "tp2-sp", "cp2",
           "pp2-interleaved", "tp2-pp2", "dp2-zero0", "tp2-dp2-zero1")  # fmt: skip
GROUPS = "--lr-group layers.1.*=0.5 --wd-group *.mlp.*=30 --decoupled-lr 2e-3 --z-loss-coeff 1e-2"


def test_all_factors_and_losses_at_once(pool):
    """muP with rates and decay of groups and z-loss, against torch's AdamW in a loop: the normal
    run's sample of this file, test_rate_groups.py and test_z_loss_layouts.py."""
    parsed = parse_layout("tp2-dp2-zero1")
    argv = [*PLAIN, *WIDE, *GROUPS.split()]
    record = pool.run(parsed.processes, train, [*argv, *flags_for(parsed)], timeout=300)[0]
    alone = train_plainly(argv)
    np.testing.assert_allclose(record.losses, alone.losses, rtol=2e-6)
    np.testing.assert_allclose(record.norms, alone.norms, rtol=1e-4)


EXACT = [
    *PLAIN, *WIDE, *"--lr 1e-3 --adam-eps 1e-4 --swiglu --normalization RMSNorm --clip-grad 0.5 "
    "--disable-bias-linear --position-embedding-type rope --num-layers 4".split(),
    *"--untie-embeddings-and-output-weights --zero-stage 0".split(), *GROUPS.split(),
]  # fmt: skip
"""Without biases: gradients of those of keys are rounding alone, which Adam makes as large as any.
Epsilon is large enough to be in the result."""


def trained_exactly(argv):
    """The trainer's steps in float64, and each parameter with its place; for the pool. DeepSpeed's
    reduction refuses float64; a plain one replaces it."""
    run, record = parse_run(None, argv), RunRecord()
    with deterministic_kernels(run.config), distributed(run.config.parallel) as mesh:
        trainer = watched_trainer(run, mesh, record.add)
        engine = trainer.engine
        engine.model.double()
        average_by(engine.engine, lambda: average_gradients(engine.trained, mesh))
        trainer.fit()
        weights = {
            name: (shard_of(p), p.detach().numpy().copy()) for p, name in engine.names.items()
        }
        return record, mesh.coordinates, weights


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.proof)])
def test_weights_are_those_of_one_process_in_float64(pool, layout):
    """Losses, norms and all weights after four steps, 1e-12, against torch's AdamW in a loop: muP
    with rates and decay of groups and z-loss."""
    parsed = parse_layout(layout)
    plain = PlainTraining(EXACT, dtype=torch.float64)
    losses, norms = zip(*(plain.step() for _ in range(4)), strict=True)
    seen = set()
    for record, places, weights in pool.run(2, trained_exactly, [*EXACT, *flags_for(parsed)]):
        np.testing.assert_allclose(record.losses, losses, rtol=1e-12)
        np.testing.assert_allclose(record.norms, norms, rtol=1e-12)
        for name, (shard, values) in weights.items():
            whole = plain.params[name].detach()[tuple(map(slice, shard.canonical_shape))]
            expected = shard.cut(whole, places).numpy()
            scale = float(whole.abs().max())
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12 * scale, err_msg=name)
        seen |= weights.keys()
    assert seen == plain.params.keys()


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_layouts_train_alike(pool, layout, optimizer):
    """AdamW against torch's in a loop, Muon against one process; deeper than the base where the
    layout has more stages."""
    parsed = parse_layout(layout)
    argv = [*PLAIN, *WIDE, *(MUON if optimizer == "muon" else []), *depth(layout)]
    record = pool.run(parsed.processes, train, [*argv, *flags_for(parsed)], timeout=300)[0]
    alone = train(argv) if optimizer == "muon" else train_plainly(argv)
    np.testing.assert_allclose(record.losses, alone.losses, rtol=2e-6)
    np.testing.assert_allclose(record.norms, alone.norms, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["muon", *(pytest.param(name, marks=pytest.mark.proof)
                                                 for name in ("adam", "sgd"))])  # fmt: skip
def test_the_base_trains_as_without_it(optimizer):
    """Losses, norms, weights and moments, bitwise; a wider model does not."""
    argv = [*PLAIN, *(MUON if optimizer == "muon" else ["--optimizer", optimizer])]
    plain, base, wide = train(argv), train([*argv, *AT_BASE]), train([*argv, *WIDE])
    assert plain.losses == base.losses and plain.norms == base.norms
    assert plain.state.keys() == base.state.keys()
    assert all(np.array_equal(plain.state[key], base.state[key]) for key in plain.state)
    assert plain.losses != wide.losses


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_resume_is_bitwise_and_the_checkpoint_has_the_multipliers(tmp_path, optimizer):
    """In another layout than it was saved; its network has the factors without any flag."""
    argv = [*PLAIN, *WIDE, *(MUON if optimizer == "muon" else [])]
    saved = ["--save", str(tmp_path), "--save-interval", "2"]
    whole = train(argv)
    train([*argv, *saved, "--exit-interval", "2"])
    rest = train([*argv, "--load", str(tmp_path)])
    assert rest.losses == whole.losses[2:]
    assert all(np.array_equal(rest.state[key], whole.state[key]) for key in whole.state)
    actual = locate_checkpoint(tmp_path)
    assert actual is not None
    model = actual.open(verify=False).model
    assert model.embedding.logits_scaling == 4.0 and model.residual_multiplier is None
    taken = train([*PLAIN, "--use-checkpoint-args", "--load", str(tmp_path), "--finetune"])
    assert taken.losses[0] == pytest.approx(whole.losses[2], abs=0.1)
