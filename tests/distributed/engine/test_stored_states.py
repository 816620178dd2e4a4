"""--use-precision-aware-optimizer: its bytes, bitwise resumes, checkpoints of any format in any
other, and layouts that agree."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from training_jobs import TINY

from megatron.apps.parity.layouts import parse_layout
from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.apps.planning.memory import state_bytes
from megatron.config import ConfigError
from megatron.engine import deepspeed_replacements
from megatron.engine.environment import distributed
from megatron.engine.state import holders, owned_slices
from megatron.features.low_bit_states import stored_states
from megatron.features.low_bit_states.stored_states import Remainder, key_of
from megatron.parallel.shard import shard_of
from megatron.run.run import parse_run

# Layers of 64 and a vocabulary that nothing divides: slices begin and end within blocks of 256.
FLAGS = [*TINY, "--hidden-size", "64", "--bf16", "--lr-decay-style", "constant", "--train-iters"]
PRECISION_AWARE = "--use-precision-aware-optimizer"
BF16_MOMENTS = ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
FORMATS = {
    "float32": [],
    "exact": [PRECISION_AWARE],
    "A": [PRECISION_AWARE, *BF16_MOMENTS],
    "B": [PRECISION_AWARE, *BF16_MOMENTS, "--main-params-dtype", "bf16"],
    "C": [PRECISION_AWARE, "--exp-avg-dtype", "int8", "--exp-avg-sq-dtype", "int8"],
}
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
SAMPLE = [pytest.param(name, marks=() if name == "B" else pytest.mark.proof) for name in "ABC"]


def run(argv: list[str]) -> dict[str, Any]:
    """Trains; for the pool. ``states`` by name, kind and start, ``model`` are the weights that the
    model computes with, ``first`` the states before the first step."""
    parsed, record = parse_run(None, argv), RunRecord()
    with distributed(parsed.config.parallel) as mesh:
        trainer = watched_trainer(parsed, mesh, record.add)
        first = states_of(trainer.engine)
        trainer.fit()
        model = {n: p.detach().float().numpy().copy() for p, n in trainer.engine.names.items()}
        return {
            "losses": record.losses,
            "norms": record.norms,
            "first": first,
            "states": states_of(trainer.engine),
            "model": model,
            "cut": {name for p, name in trainer.engine.names.items() if shard_of(p).cuts},
        }


def states_of(engine: Any) -> dict[str, np.ndarray]:
    return {
        f"{own.name}{shard_of(own.param).part}/{kind}/{own.slice.start}": own.get(kind)
        .detach()
        .numpy()
        .copy()
        for own in owned_slices(engine)
        for kind in own.kinds
    }


def check_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("size", "stage", "name"),
    [
        (2, 2, "B"), (2, 1, "C"),
        pytest.param(1, 1, "A", marks=pytest.mark.proof),
        pytest.param(1, 1, "B", marks=pytest.mark.proof),
        pytest.param(1, 1, "C", marks=pytest.mark.proof),
        pytest.param(2, 2, "C", marks=pytest.mark.proof),
        pytest.param(1, 1, "exact", marks=pytest.mark.proof),
    ],
)  # fmt: skip
def test_resume_is_bitwise(pool, tmp_path, size, stage, name):
    """A checkpoint has float32 values; states, losses and random bits continue as if there were
    none."""
    flags = [*FLAGS, "6", "--zero-stage", str(stage), *FORMATS[name]]
    straight = pool.run(size, run, flags)
    save = ["--save", str(tmp_path), "--save-interval", "3", "--exit-interval", "3"]
    stopped = pool.run(size, run, [*flags, *save])
    resumed = pool.run(size, run, [*flags, "--load", str(tmp_path)])
    for a, b, c in zip(straight, stopped, resumed, strict=True):
        check_same(c["first"], b["states"])
        assert b["losses"] + c["losses"] == a["losses"]
        check_same(c["states"], a["states"])
        check_same(c["model"], a["model"])


def test_exact_main_weights_with_float32_moments_are_those_of_float32_states(pool):
    """Bit for bit what the definition computes; the fused kernel rounds a little differently."""
    flags = [*FLAGS, "4", "--zero-stage", "1"]
    expected, found = (pool.run(1, run, flags + FORMATS[name])[0] for name in ("float32", "exact"))
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-4)
    for name, values in expected["states"].items():
        # Main weights that differ in rounding are seldom rounded to other 16-bit weights, whose
        # gradients differ by as much as the CPU's products do.
        near = np.isclose(found["states"][name], values, rtol=2e-2, atol=0.02 * abs(values).max())
        assert near.mean() > 0.7, name


@pytest.mark.parametrize("name", ["A", pytest.param("C", marks=pytest.mark.proof)])
def test_model_computes_with_the_main_weights(pool, name):
    """Which in B are the model's own."""
    found = pool.run(1, run, [*FLAGS, "3", "--zero-stage", "1", *FORMATS[name]])[0]
    for key, values in found["states"].items():
        param, kind, _ = key.rsplit("/", 2)
        if kind == "weight":
            rounded, _ = Remainder().encode(torch.from_numpy(values))
            model = found["model"][param].reshape(-1)
            np.testing.assert_array_equal(model, rounded.float().numpy())


LAYOUTS = [
    (2, ["--zero-stage", "1"]),
    (2, ["--zero-stage", "2"]),
    (2, ["--zero-stage", "1", "--tensor-model-parallel-size", "2"]),
    (2, ["--zero-stage", "1", "--pipeline-model-parallel-size", "2"]),
]


@pytest.mark.parametrize("name", SAMPLE)
def test_layouts_agree(pool, name):
    """To rounding in 16 bits; copies of a parameter on several ranks stay equal bit for bit."""
    flags = [*FLAGS, "3", *FORMATS[name], *NO_DROPOUT, "--lr", "1e-3"]
    one = pool.run(1, run, [*flags, "--zero-stage", "1"])[0]
    for size, layout in LAYOUTS:
        ranks = pool.run(size, run, [*flags, *layout])
        np.testing.assert_allclose(ranks[0]["losses"], one["losses"], rtol=3e-3, err_msg=layout)
        np.testing.assert_allclose(ranks[0]["norms"], one["norms"], rtol=3e-2, err_msg=layout)
        both = ranks[0]["model"].keys() & ranks[1]["model"].keys()
        assert both
        for param in both:
            a, b = (rank["model"][param] for rank in ranks)
            if "tensor" not in layout[-2] or param not in ranks[0]["cut"]:
                np.testing.assert_array_equal(a, b, err_msg=f"{layout} {param}")


def test_blocks_with_copies_have_no_other_elements(pool):
    """Elements of a block share a scale, so that a copy next to a shard would be rounded
    differently on each tensor-parallel rank."""
    flags = [*FLAGS, "4", *FORMATS["C"], *NO_DROPOUT, "--num-experts", "4", "--zero-stage", "1"]
    ranks = pool.run(2, run, [*flags, "--tensor-model-parallel-size", "2"])
    copies = ranks[0]["model"].keys() - ranks[0]["cut"]
    assert any("router" in name for name in copies)
    for name in copies:
        np.testing.assert_array_equal(*(rank["model"][name] for rank in ranks), err_msg=name)


def test_random_bits_do_not_depend_on_data_ranks(pool):
    """A step with gradients of 0 only decays: what rounds is the same wherever it is computed."""
    flags = [*FLAGS, "3", *FORMATS["B"], *NO_DROPOUT, "--clip-grad", "1e-30"]
    flags += ["--weight-decay", "0.5"]
    one = matrices(pool.run(1, run, [*flags, "--zero-stage", "1"])[0])
    for stage in ("1", "2"):
        for rank in pool.run(2, run, [*flags, "--zero-stage", stage]):
            check_same(matrices(rank), one)
    other = matrices(pool.run(1, run_with_other_bits, [*flags, "--zero-stage", "1"])[0])
    assert all((other[name] != values).any() for name, values in one.items())


def run_with_other_bits(argv: list[str]) -> dict[str, Any]:
    """The same run, rounded with the random bits of another seed; for the pool."""

    def other(seed: int, *rest: Any) -> int:
        return key_of(seed + 1, *rest)

    with mock.patch.object(stored_states, "key_of", other):
        return run(argv)


def matrices(found: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: values for name, values in found["model"].items() if values.ndim > 1}


@pytest.mark.proof
def test_any_format_loads_any(pool, tmp_path):
    """Values arrive as exactly as the other format has them, and training continues."""
    expected = {}
    for name, flags in FORMATS.items():
        save = ["--save", str(tmp_path / name), "--save-interval", "3", "--exit-interval", "3"]
        expected[name] = pool.run(1, run, [*FLAGS, "4", "--zero-stage", "1", *flags, *save])[0]
    near = {"float32": 0.0, "exact": 0.0, "A": 2**-8, "B": 2**-8, "C": 2**-4}
    for source, target in [
        ("C", "float32"), ("float32", "C"), ("B", "A"), ("A", "B"), ("A", "C"), ("C", "exact"),
    ]:  # fmt: skip
        load = ["--load", str(tmp_path / source), "--zero-stage", "2"]
        found = pool.run(1, run, [*FLAGS, "4", *load, *FORMATS[target]])[0]
        assert len(found["losses"]) == 1 and np.isfinite(found["losses"]).all()
        saved = expected[source]["states"]
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            names = [name for name in saved if f"/{kind}/" in name]
            loss = near[target] if kind != "weight" else near["B"] if target == "B" else 0.0
            largest = max(np.abs(saved[name]).max() for name in names)
            for name in names:
                np.testing.assert_allclose(
                    found["first"][name], saved[name], rtol=loss, atol=largest * 2**-15,
                    err_msg=f"{source} -> {target} {name}",
                )  # fmt: skip


def stored_bytes(argv: list[str]) -> tuple[int, int, set[torch.dtype]]:
    """(bytes of the optimizer's states, elements of its partitions, dtypes of main weights); for
    the pool."""
    parsed = parse_run(None, argv)
    with distributed(parsed.config.parallel) as mesh:
        trainer = watched_trainer(parsed, mesh, lambda result: None)
        trainer.fit()
        engine, found = trainer.engine, {}
        mains = holders(engine)
        shared = {param.untyped_storage().data_ptr() for param in engine.names}
        for main in mains:
            for tensor in (main, *engine.optimizer.state[main].values()):
                storage = tensor.untyped_storage()
                if tensor.dim() and storage.data_ptr() not in shared:
                    found[storage.data_ptr()] = storage.nbytes()
        assert all(param._hp_mapping is None for param in engine.names) or not any(
            main.dtype == torch.bfloat16 for main in mains
        )
        return sum(found.values()), sum(m.numel() for m in mains), {m.dtype for m in mains}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in "BC" else pytest.mark.proof) for n in FORMATS]
)
def test_bytes_are_those_of_the_planner(pool, name):
    flags = [*FLAGS, "1", "--zero-stage", "1", *FORMATS[name]]
    size, elements, dtypes = pool.run(1, stored_bytes, flags)[0]
    layout = dataclasses.replace(
        parse_layout("zero1-bf16"), states=parse_run(None, flags).config.precision.states
    )
    expected = state_bytes(layout).optimizer
    # The last block of each of the two groups may be a part of one.
    assert expected * elements <= size <= expected * elements + 4 * 2 * 2
    assert dtypes == {torch.float32 if name == "float32" else torch.bfloat16}


def test_an_untested_deepspeed_is_refused(pool, monkeypatch):
    monkeypatch.setattr(deepspeed_replacements.deepspeed, "__version__", "0.99.0")
    with pytest.raises(ConfigError, match="reduction of gradients"):
        deepspeed_replacements.require(deepspeed_replacements.OWN_REDUCTION)
