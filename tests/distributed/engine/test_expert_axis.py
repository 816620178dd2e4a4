"""Parameters that are cut over the axis ``expert``, alone or together with ``tensor``: training
equals one process at every ZeRO stage and dtype, resumes bitwise, and continues at any other size
of the axis. The reference is the same model in plain torch, or the engine on one process."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch
import training_jobs
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from experts_gpt import expert_axis
from samples import sampled
from training_jobs import TINY

from megatron.apps.parity.gradients import first_difference, reference_gradients
from megatron.apps.parity.runs import PlainTraining, watched_trainer
from megatron.config import ConfigError
from megatron.engine.deepspeed_replacements import FEWER_REPLICAS_3, require
from megatron.engine.environment import distributed
from megatron.engine.state import owned_slices
from megatron.families import spec_of
from megatron.features.experts.axis import check_divided
from megatron.features.resilience.steps.replicas import Replicas
from megatron.features.trackers.tensorboard import state_norms
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

STEPS = 5
FLAGS = [
    *TINY, "--model-family", "experts", "--hidden-dropout", "0", "--attention-dropout", "0",
    "--lr-decay-style", "constant", "--hidden-size", "16", "--train-iters", str(STEPS),
]  # fmt: skip
SGD = "--optimizer sgd --lr 0.5 --weight-decay 0.01".split()
LOW = ["--lr", "1e-3"]  # so that what half precision rounds away does not grow
BF16, FP16 = ["--bf16", *LOW], ["--fp16", "--initial-loss-scale", "1024", *LOW]
FP32_SUMS = [*BF16, "--accumulate-allreduce-grads-in-fp32"]
STATES = [*BF16, *"--use-precision-aware-optimizer --exp-avg-dtype bf16".split()]
CLIP = ["--clip-grad", "0.1"]
TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
LAYOUTS = {
    # ranks, ranks along the axis, experts cut over it and tensor together, flags
    "ep2": (2, 2, False, []),
    "ep2-dp2": (4, 2, False, []),
    "ep4": (4, 4, False, []),
    "ep2-tp2": (4, 2, False, TP2),
    "ep2-tp2-joint": (4, 2, True, TP2),
    "tp2-joint": (2, 1, True, TP2),
    "ep2-pp2": (4, 2, False, PP2),
}
KINDS = {
    "fp32": [], "sgd": SGD, "bf16": BF16, "fp16": FP16, "sums": FP32_SUMS, "offload": [],
    "states": STATES,
}  # fmt: skip


def stage(number: int) -> list[str]:
    return ["--zero-stage", str(number)]


def train(argv, axis, joint):
    """Losses, norms, and every slice of weights and moments with its place; for the pool."""
    with expert_axis(axis, joint):
        run, steps = parse_run(None, argv), []
        with distributed(run.config.parallel) as mesh:
            trainer = watched_trainer(run, mesh, steps.append)
            trainer.fit()
            slices = [
                (own.name, kind, own.slice, values[: own.slice.numel].detach().numpy().copy())
                for own in owned_slices(trainer.engine)
                for kind, values in ((kind, own.get(kind)) for kind in own.kinds)
            ]
            length = float(state_norms(trainer.engine)["weight_l2"])
            assert Replicas(trainer.engine).difference() is None
    return [float(s.loss) for s in steps], [float(s.grad_norm) for s in steps], slices, length


def gradients(argv, axis, joint):
    """One step in float64; for the pool."""
    with expert_axis(axis, joint):
        return training_jobs.gradients(argv)


def whole(ranks) -> dict[tuple[str, str], np.ndarray]:
    """Whole tensors from the slices of all ranks, whose copies must be the same."""
    wholes: dict[tuple[str, str], torch.Tensor] = {}
    for name, kind, part, values in (each for rank in ranks for each in rank[2]):
        known = wholes.setdefault((name, kind), torch.full(part.shape, torch.nan))
        flat, there = known.view(-1), type(part).whole(part.shape)
        common = there.overlap(part)
        if common is not None:
            before = flat.clone()
            common.copy(flat, torch.from_numpy(values)[common.first : common.end])
            again = ~before.isnan()
            assert torch.equal(before[again], flat[again]), (name, kind)
    assert not any(values.isnan().any() for values in wholes.values())
    return {key: values.numpy() for key, values in wholes.items()}


@cache
def plain(argv):
    """Losses, norms and weights of the same training in plain torch."""
    with expert_axis(1, False):
        training = PlainTraining(list(argv))
        steps = [training.step() for _ in range(STEPS)]
        weights = {n: p.detach().numpy().copy() for n, p in training.params.items()}
    return *map(list, zip(*steps, strict=True)), weights


@cache
def alone(pool, argv):
    """The run on one process of the engine, for dtypes that plain torch has no main weights in."""
    (one,) = pool.run(1, train, list(argv), 1, False)
    return one[0], one[1], {n: v for (n, kind), v in whole([one]).items() if kind == "weight"}


def stages(folder, number: int, kind: str) -> list[str]:
    """Flags of a ZeRO stage; at stage 3 no parameter of this small model may stay gathered."""
    zero = {"stage": number}
    if number == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if kind == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
        zero |= {"offload_param": {"device": "cpu"}} if number == 3 else {}
    path = folder / "ds.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    return ["--deepspeed_config", str(path)]


def check(pool, folder, layout, number, kind, *flags):
    ranks, axis, joint, of_layout = LAYOUTS[layout]
    argv = [*FLAGS, *KINDS[kind], *CLIP, *flags]
    if "pp2" in layout and kind in ("sgd", "fp16", "offload"):
        argv += ["--num-layers", "4"]  # each stage has experts, as these need
    zero = stages(folder, number, kind)
    results = pool.run(ranks, train, [*argv, *zero, *of_layout], axis, joint)
    rough = kind in ("bf16", "fp16", "sums", "states")
    losses, norms, weights = alone(pool, (*argv, *stage(1))) if rough else plain(tuple(argv))
    for rank in results:
        np.testing.assert_allclose(rank[1][0], norms[0], rtol=5e-3 if rough else 2e-6)
        np.testing.assert_allclose(rank[0], losses, rtol=2e-3 if rough else 2e-6)
        np.testing.assert_allclose(rank[1], norms, rtol=2e-2 if rough else 2e-4)
    state = whole(results)
    squares = sum(
        float(np.square(v, dtype=float).sum()) for (_, k), v in state.items() if k == "weight"
    )
    assert [rank[3] for rank in results] == pytest.approx([squares**0.5] * ranks, rel=1e-6)
    assert {name for name, _ in state} == weights.keys()
    far = {
        # Of the vocabulary without padding.
        name: np.abs(state[name, "weight"] - values[: len(state[name, "weight"])])
        for name, values in weights.items()
    }
    furthest = max(far, key=lambda name: far[name].max())
    assert far[furthest].max() <= (4e-3 if rough else 2e-5), furthest
    mean = np.concatenate([each.ravel() for each in far.values()]).mean()
    assert mean <= (1e-4 if rough else 1e-6)


CASES = [
    (layout, number, kind)
    for layout in LAYOUTS
    for number in range(4)
    for kind in KINDS
    if not (number > 1 and "pp2" in layout)
    and not (kind == "sums" and number != 1)
    and not (kind == "offload" and number == 0)
    and not (kind == "states" and number not in (1, 2))
]
SAMPLE = {("ep2", 3, "fp32")}


@pytest.mark.parametrize(("layout", "number", "kind"), sampled(CASES, SAMPLE.__contains__))
def test_training_equals_one_process(pool, tmp_path, layout, number, kind):
    check(pool, tmp_path, layout, number, kind)


@cache
def step_alone():
    """A step of one process in float64, and the layers of the model."""
    with expert_axis(1, False):
        config = parse_run(None, FLAGS).config
        layers = spec_of(config.model, config.parallel).layers(TensorParallel())
        return reference_gradients(FLAGS), layers


@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"ep2-tp2", "ep2-tp2-joint"}.__contains__))
def test_gradients_in_float64(pool, layout):
    ranks, axis, joint, flags = LAYOUTS[layout]
    records = pool.run(ranks, gradients, [*FLAGS, *flags], axis, joint)
    reference, layers = step_alone()
    assert first_difference(records, reference, layers) is None


RESUMED = {
    "zero 0, fp16": ("ep2", 0, "fp16"),
    "zero 1, fp16, two replicas": ("ep2-dp2", 1, "fp16"),
    "zero 1, sums": ("ep2-dp2", 1, "sums"),
    "zero 2, bf16, tensor": ("ep2-tp2", 2, "bf16"),
    "zero 2, offload": ("ep2", 2, "offload"),
    "zero 3, bf16": ("ep2", 3, "bf16"),
    "zero 3, two replicas": ("ep2-dp2", 3, "fp32"),
    "zero 1, pipeline": ("ep2-pp2", 1, "bf16"),
}


@pytest.mark.proof
@pytest.mark.parametrize("case", list(RESUMED))
def test_resumes_bitwise(pool, tmp_path, case):
    layout, number, kind = RESUMED[case]
    ranks, axis, joint, flags = LAYOUTS[layout]
    argv = [*FLAGS, *KINDS[kind], *flags, *stages(tmp_path, number, kind)]
    expected = pool.run(ranks, train, argv, axis, joint)
    saved = [*argv, "--exit-interval", "2", "--save", str(tmp_path / "run")]
    pool.run(ranks, train, saved, axis, joint)
    results = pool.run(ranks, train, [*argv, "--load", str(tmp_path / "run")], axis, joint)
    for mine, theirs in zip(results, expected, strict=True):
        assert mine[:2] == (theirs[0][2:], theirs[1][2:])
        for (*what, values), (*same, right) in zip(mine[2], theirs[2], strict=True):
            assert what == same
            np.testing.assert_array_equal(values, right, err_msg=str(what[:2]))


SAVED = [("ep2-tp2", 1), ("ep2", 3), ("ep2", 0), ("ep2-tp2-joint", 2), ("ep4", 1)]
LOADED = [("alone", 0), ("ep2", 1), ("ep4", 3), ("ep2-tp2", 2), ("ep2-tp2-joint", 3)]
LAYOUTS_OF_LOADS = {**LAYOUTS, "alone": (1, 1, False, [])}


@pytest.mark.proof
@pytest.mark.parametrize(("saved", "loads"), [(each, LOADED) for each in SAVED])
def test_any_size_of_the_axis_continues_from_any(pool, tmp_path, saved, loads):
    """Weights and moments, bit for bit."""

    def run(layout, number, *more):
        ranks, axis, joint, flags = LAYOUTS_OF_LOADS[layout]
        argv = [*FLAGS, "--train-iters", "2", *flags, *stages(tmp_path, number, "fp32"), *more]
        return whole(pool.run(ranks, train, argv, axis, joint))

    folder = str(tmp_path / "run")
    expected = run(*saved, "--save", folder)
    assert {kind for _, kind in expected} == {"weight", "exp_avg", "exp_avg_sq"}
    for layout in loads:
        loaded = run(*layout, "--load", folder)
        assert loaded.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_array_equal(loaded[key], values, err_msg=f"{layout} {key}")


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
WRONG = {
    "contiguous_gradients false": ({"contiguous_gradients": False, **OFFLOADED}, 2),
    "reduce_scatter false": ({"reduce_scatter": False, **OFFLOADED}, 1),
    "zero_hpz_partition_size 2": ({"zero_hpz_partition_size": 2}, 3),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_deepspeed_gets_wrong_is_refused(what):
    zero, number = WRONG[what]
    settings = {"zero_optimization": {**zero, "stage": number}}
    with pytest.raises(ConfigError, match=f"{what}.*experts that are divided over ranks"):
        check_divided(settings, number)
    check_divided(settings, 0)


def test_stage_3_of_an_older_deepspeed_is_refused(monkeypatch):
    monkeypatch.delattr(DeepSpeedZeroOptimizer_Stage3, "_autoep_expert_parallel_group")
    with pytest.raises(ConfigError, match=r"wrong ranks: use --zero-stage 1 or 2, .*deepspeed=="):
        require(FEWER_REPLICAS_3)


def flipped(argv, axis, joint, name, rank):
    """Message about a bit that changes in a rank's copy of a weight; for the pool."""
    with expert_axis(axis, joint):
        run = parse_run(None, argv)
        with distributed(run.config.parallel) as mesh:
            engine = watched_trainer(run, mesh, lambda step: None).engine
            replicas = Replicas(engine)
            if mesh.world.rank == rank:
                param = next(param for param, known in engine.names.items() if known == name)
                param.data.view(-1)[0] += 1.0
            return replicas.difference()


@pytest.mark.proof
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_changed_expert_is_found(pool, tmp_path, number):
    """Copies of two replicas are compared; the other experts are other tensors."""
    name = "layers.1.mlp.up"
    argv = [*FLAGS, *BF16, *stages(tmp_path, number, "bf16")]
    for rank in range(4):
        messages = pool.run(4, flipped, argv, 2, False, name, rank)
        assert len(set(messages)) == 1 and name in messages[0] and f"rank {rank} " in messages[0]
