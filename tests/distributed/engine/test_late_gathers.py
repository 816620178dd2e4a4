"""Updated weights that are gathered behind the next forward pass: nothing else changes, nothing is
read before it has arrived, and a layer waits for no other's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from poisoned_group import poisoned
from pool import RankError
from safetensors.numpy import load_file
from training_jobs import TINY, train

from megatron.apps.parity.runs import RunRecord
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.zero_optimizer import ReducingOptimizer
from megatron.features.overlap import gathers

FLAGS = [*TINY, "--num-layers", "4", "--train-iters", "3", "--zero-reduce-bucket-size", "4000"]
AT_ONCE = "--no-overlap-param-gather"
REPLICAS = "--check-weight-hash-across-dp-replicas-interval 1"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0 "
    "--expert-model-parallel-size 2"
)
PIPELINE = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "dp2": (2, "--bf16"),
    "untied": (2, "--bf16 --untie-embeddings-and-output-weights"),
    "zero2": (2, "--zero-stage 2"),
    "dp4": (4, ""),
    "recomputed": (
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "tp2-sp": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (4, PIPELINE),
    "interleaved": (4, f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"),
    "dualpipev": (4, f"{PIPELINE} --pipeline-schedule dualpipev --global-batch-size 8"),
    "zbh1": (4, f"{PIPELINE} --pipeline-schedule zbh1"),
    "cp2": (4, "--context-parallel-size 2 --attention-dropout 0"),
    "experts": (2, EXPERTS),
    "small states": (
        2,
        "--bf16 --use-precision-aware-optimizer --main-params-dtype bf16 --exp-avg-dtype bf16",
    ),
    "fp8": (2, "--bf16 --fp8-format hybrid"),
    "evaluated": (2, "--eval-interval 1 --eval-iters 1"),
    "replicas": (2, REPLICAS),
}
READ = ("evaluated", "replicas")
SAMPLE = ("interleaved",)


def never(wrapper: ReducingOptimizer, numbers: object = None) -> None:
    """Instead of a wait."""


@contextmanager
def unawaited(by_layers: bool) -> Iterator[None]:
    """Layers do not wait for their weights; or all others who read weights."""
    wait = ReducingOptimizer.await_weights

    def some(wrapper: ReducingOptimizer, numbers: Any = None) -> None:
        if (numbers is None) == by_layers:
            wait(wrapper, numbers)

    with mock.patch.object(ReducingOptimizer, "await_weights", some):
        yield


MUTATIONS = {
    None: nullcontext,
    "layers": lambda: unawaited(True),
    "others": lambda: unawaited(False),
}


def job(argv: list[str], mutation: str | None = None) -> tuple[RunRecord, list[tuple[int, int]]]:
    """A run on groups on which nothing arrives before it is waited for; and after each layer, its
    index and the number of gathers that have not been waited for. For the pool."""
    left: list[tuple[int, int]] = []
    make = gathers.gather_late

    def noting(engine: TrainEngine) -> None:
        make(engine)
        arriving = engine.optimizer_wrapper._arriving
        for sequence in engine.sequences:
            sequence.observe(lambda index, _: left.append((index, len(arriving))))

    with (
        poisoned() as pending,
        MUTATIONS[mutation](),
        mock.patch.object(gathers, "gather_late", noting),
    ):
        record = train(argv)
        assert not pending, pending
    return record, left


def same(record: RunRecord, other: RunRecord) -> None:
    assert (record.losses, record.norms) == (other.losses, other.norms)
    assert record.state.keys() == other.state.keys()
    for name, values in record.state.items():
        np.testing.assert_array_equal(values, other.state[name], err_msg=name)


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=() if x in SAMPLE else pytest.mark.proof) for x in LAYOUTS]
)
def test_nothing_changes(pool, layout):
    ranks, words = LAYOUTS[layout]
    flags = [*FLAGS, "--zero-stage", "1", *words.split()]
    at_once = pool.run(ranks, job, [*flags, AT_ONCE])
    for (record, left), (other, none) in zip(pool.run(ranks, job, flags), at_once, strict=True):
        same(record, other)
        assert not none and left[-1][1] == 0
        # After the first layer those of others are on their way, unless all weights were read.
        assert layout in READ or max(count for _, count in left) > 1


@pytest.mark.parametrize(
    "mutation, more, message",
    [
        ("layers", "", "loss is nan|not finite"),
        pytest.param("others", REPLICAS, "model's weights are not", marks=pytest.mark.proof),
    ],
)
def test_a_missing_wait_is_noticed(pool, mutation, more, message):
    with pytest.raises(RankError, match=message):
        pool.run(2, job, [*FLAGS, "--bf16", "--zero-stage", "1", *more.split()], mutation)


@pytest.mark.proof
@pytest.mark.parametrize("form", ["safetensors", "deepspeed"])
def test_checkpoints_and_resuming(pool, tmp_path, form):
    """A checkpoint between two steps equals one of a run without, and continues bitwise."""
    flags = [*FLAGS, "--bf16", "--zero-stage", "1", "--checkpoint-format", form]
    longer = [*flags, "--train-iters", "4"]
    (whole, _), _ = pool.run(2, job, longer)
    folders = {name: tmp_path / name for name in ("late", "at once")}
    for name, more in (("late", []), ("at once", [AT_ONCE])):
        saving = ["--save", str(folders[name]), "--save-interval", "1", "--exit-interval", "2"]
        pool.run(2, job, [*longer, *more, *saving])
    for name, more in (("late", [AT_ONCE]), ("at once", [])):
        (record, _), _ = pool.run(2, job, [*longer, *more, "--load", str(folders[name])])
        assert record.losses == whole.losses[2:]
        for key, values in whole.state.items():
            np.testing.assert_array_equal(values, record.state[key], err_msg=key)
    ours, others = (tensors(folder) for folder in folders.values())
    assert ours.keys() == others.keys() and (ours or form == "deepspeed")
    for name, values in ours.items():
        np.testing.assert_array_equal(values, others[name], err_msg=name)


def tensors(folder: Path) -> dict[str, Any]:
    """All tensors of the safetensors files below a folder, as bytes."""
    files = sorted(folder.rglob("*.safetensors"))
    return {
        f"{path.relative_to(folder)} {name}": values
        for path in files
        for name, values in load_file(path).items()
    }
