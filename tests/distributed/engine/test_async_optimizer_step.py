"""Steps that the host queues without reading the device: equal to DeepSpeed's own, and truly so."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from samples import sampled
from torch.utils._python_dispatch import TorchDispatchMode
from training_jobs import TINY

from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.data.loader import MicroBatches
from megatron.engine import deepspeed_patches, deepspeed_replacements
from megatron.engine.environment import distributed
from megatron.engine.state import optimizer_step, owned_slices
from megatron.parallel.shard import shard_of
from megatron.run.run import parse_run
from megatron.training.stopping import NonFiniteGuard, TrainingStopped
from megatron.training.trainer import Trainer

FLAGS = [*TINY, "--train-iters", "5", "--lr-decay-style", "constant"]
SUMS_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"


def state_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """Weights, moments and number of updates of this rank."""
    found = {"updates": np.array(optimizer_step(trainer.engine))}
    for own in owned_slices(trainer.engine):
        for kind in own.kinds:
            name = f"{own.name}{shard_of(own.param).part}/{kind}/{own.slice.start}"
            found[name] = own.get(kind).detach().numpy().copy()
    return found


def as_others(wrapper: Any) -> None:
    """Names the groups of DeepSpeed's optimizer for sums in float32 as those of ZeRO 1."""
    if isinstance(wrapper, BF16_Optimizer):
        wrapper.round_robin_bit16_groups = wrapper.bf16_groups
        wrapper.single_partition_of_fp32_groups = wrapper.fp32_groups_flat_partition


def poison(trainer: Trainer, step: int) -> None:
    """Makes one gradient of that step NaN, or infinite where the stage is even, on the first rank;
    others get to know by the norm."""
    if trainer.engine.mesh.world.rank:
        return
    param = next(param for param, name in trainer.engine.names.items() if "norm" in name)

    value = float("nan" if trainer.engine.stage % 2 else "inf")

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, value) if trainer.iteration == step - 1 else grad

    param.register_hook(hook)


@contextlib.contextmanager
def as_deepspeed_does(stock: bool) -> Iterator[None]:
    """Leaves DeepSpeed as it is, where ``stock``, but for how it starts."""
    at_start = (deepspeed_replacements.NO_OPERATORS, deepspeed_replacements.NO_COMPILER)
    made = at_start.__contains__ if stock else deepspeed_patches.made
    with mock.patch.object(deepspeed_patches, "made", made):
        yield


def run(argv: list[str], stock: bool, bad: int | None = None, lag: int = 0) -> dict[str, Any]:
    """Trains; for the pool. ``stock``: with the norm, clipping, copies and reads of DeepSpeed."""
    config, record, stopped = parse_run(None, argv), RunRecord(), ""
    with as_deepspeed_does(stock), distributed(config.config.parallel) as g:
        trainer = watched_trainer(config, g, record.add)
        as_others(trainer.engine.optimizer_wrapper)
        guard = next(c for c in trainer.callbacks if isinstance(c, NonFiniteGuard))
        guard._reads.lag = lag
        if bad is not None:
            poison(trainer, bad)
        try:
            trainer.fit()
        except TrainingStopped as error:
            stopped = str(error)
        return {"state": state_of(trainer), "record": record, "stopped": stopped}


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a["record"].losses, b["record"].losses)
        np.testing.assert_allclose(a["record"].norms, b["record"].norms, rtol=1e-6)
        assert a["record"].skipped == b["record"].skipped
        assert a["state"].keys() == b["state"].keys()
        for name, values in b["state"].items():
            np.testing.assert_array_equal(a["state"][name], values, err_msg=name)


LAYOUTS = {
    "one": (1, []),
    "dp2": (2, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
}
SAMPLE = {
    ("tp2", 3, "bf16"),
    ("pp2", 1, "bf16"),
}
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.proof)
    for case in (
        (layout, stage, form)
        for layout in LAYOUTS
        for stage in ((0, 1) if layout == "pp2" else (0, 1, 2, 3))
        for form in ("fp32", "bf16")
    )
]


def flags_of(layout: str, stage: int, form: str) -> tuple[int, list[str]]:
    size, flags = LAYOUTS[layout]
    if (layout, stage) == ("tp2", 3):
        size = 4  # one replica's weights are not partitioned
    precision = [] if form == "fp32" else [f"--{form}"]
    return size, [*FLAGS, *flags, *precision, "--zero-stage", str(stage)]


def check_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a["record"].norms, b["record"].norms, rtol=1e-6)
        for name, values in b["state"].items():
            np.testing.assert_allclose(a["state"][name], values, rtol=1e-4, atol=2e-6, err_msg=name)


UNCLIPPED = ["--clip-grad", "0"]
# In a second step a weight that rounds to another 16-bit number changes gradients. Moments show
# what was clipped.
CLIPPED = ["--clip-grad", "0.05", "--exit-interval", "1"]


@pytest.mark.parametrize(("layout", "stage", "form"), CASES)
def test_against_deepspeed(pool, layout, stage, form):
    size, flags = flags_of(layout, stage, form)
    compare_with_deepspeed(pool, size, flags)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.proof
def test_against_deepspeed_with_sums_in_fp32(pool, size):
    compare_with_deepspeed(pool, size, [*FLAGS, "--zero-stage", "1", "--bf16", SUMS_IN_FP32])


def compare_with_deepspeed(pool, size: int, flags: list[str]) -> None:
    """Bit for bit; where clipping follows a norm that was summed in another order, to rounding."""
    for clip, check in ((UNCLIPPED, check_same), (CLIPPED, check_close)):
        expected = pool.run(size, run, [*flags, *clip], True)
        assert all(norm > 0.05 for norm in expected[0]["record"].norms), "there is work to do"
        check(pool.run(size, run, [*flags, *clip], False), expected)


BAD = [(0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")]


@pytest.mark.parametrize(("stage", "form"), sampled(BAD, lambda case: case in BAD[1:3]))
def test_skipped_step_changes_nothing(pool, stage, form):
    """The third step's gradients are not finite; DeepSpeed leaves weights, moments and the number
    of updates alone, and continues."""
    _, flags = flags_of("dp2", stage, form)
    flags += [*UNCLIPPED, "--no-check-for-nan-in-loss-and-grad"]
    found, expected = (pool.run(2, run, flags, stock, 3) for stock in (False, True))
    assert found[0]["record"].skipped == [False, False, True, False, False]
    assert found[0]["record"].norms[2] == np.inf
    assert found[0]["state"]["updates"] == 4
    check_same(found, expected)


@pytest.mark.parametrize(
    ("stage", "form", "lag"),
    [
        pytest.param(stage, form, lag, marks=() if lag and stage == 3 else pytest.mark.proof)
        for stage, form in [*BAD, (1, SUMS_IN_FP32)]
        for lag in (0, 2)
    ],
)
def test_stops_with_the_weights_from_before(pool, stage, form, lag):
    """However late the CPU synchronizes, the steps after the bad one have changed nothing."""
    flags = [*FLAGS, "--zero-stage", str(stage)]
    flags += {"fp32": [], "bf16": ["--bf16"], SUMS_IN_FP32: ["--bf16", SUMS_IN_FP32]}[form]
    before = pool.run(2, run, [*flags, "--exit-interval", "2"], False)
    stopped = pool.run(2, run, flags, False, 3, lag)
    for a, b in zip(stopped, before, strict=True):
        assert "at iteration 3, samples 8 to 11" in a["stopped"]
        assert len(a["record"].losses) == 3 + lag
        for name, values in b["state"].items():
            np.testing.assert_array_equal(a["state"][name], values, err_msg=name)


def saved(argv: list[str], folder: str, lag: int) -> str:
    """The message of a run that would save after its bad step; for the pool."""
    return str(run([*argv, "--save", folder, "--save-interval", "3"], False, 3, lag)["stopped"])


def test_nothing_is_saved_before_it_is_looked_at(pool, tmp_path):
    flags = [*FLAGS, "--zero-stage", "1", "--bf16"]
    assert "at iteration 3" in pool.run(1, saved, flags, str(tmp_path / "run"), 2)[0]
    assert not list((tmp_path / "run").glob("global_step*"))


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    KINDS = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.masked_select.default,
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in self.KINDS:
            self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


def reads(argv: list[str]) -> int:
    """Reads of a step after three others; for the pool."""
    config = parse_run(None, argv)
    with distributed(config.config.parallel) as groups:
        trainer = watched_trainer(config, groups, lambda result: None)
        batches = MicroBatches(
            trainer.data.datasets.train, trainer.data.collate, micro_batch_size=1, num_workers=0
        )
        for _ in range(3):
            trainer.step(batches)
        with Reads() as counted:
            result = trainer.engine.train_step(batches, 2, 12, 1e-3, 0.1)
        assert all(
            torch.is_tensor(value) for value in (result.loss, result.grad_norm, result.skipped)
        )
        return sum(counted.found.values())


FORMS = ([], ["--bf16"], ["--bf16", SUMS_IN_FP32])


@pytest.mark.parametrize(
    ("size", "stage", "form"),
    sampled(
        [
            *((1, stage, form) for stage in range(4) for form in FORMS[: 2 if stage == 0 else 3]),
            *((2, stage, form) for stage in (1, 2, 3) for form in FORMS),
        ],
        lambda case: case[2] == ["--bf16"] and case[:2] in ((1, 1), (2, 2), (2, 3)),
    ),
)
def test_nothing_is_read(pool, size, stage, form):
    """At stage 3 DeepSpeed's step reads a norm; it gets one that never was on the device."""
    found = pool.run(size, reads, [*FLAGS, "--zero-stage", str(stage), *form])[0]
    assert found == (1 if stage == 3 and size > 1 else 0)
