"""What workers of the pool do in tests of whole training runs, and the layouts that they run."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

from megatron.apps.parity import gradients as parity_gradients
from megatron.apps.parity import runs
from megatron.apps.parity.gradients import GradientRecord
from megatron.apps.parity.layouts import parse_layout
from megatron.apps.parity.runs import RunRecord
from megatron.engine.environment import distributed
from megatron.run.run import parse_run
from megatron.training.checkpoints import CheckpointManager

__all__ = [
    *("CONTEXT_LAYOUTS", "LAYOUTS", "SAVED_LAYOUTS", "TINY"),
    *("depth", "gradients", "run", "saved_again", "train", "train_plainly"),
]

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --weight-decay 0.1 "
    "--tokenizer-type NullTokenizer --vocab-size 99 --make-vocab-size-divisible-by 8 --mock-data "
    "--num-workers 0 --eval-iters 0 --peak-tflops 1 --log-interval 1000"
).split()
"""Flags of a model that trains in milliseconds; dropout is on, by default. On up to four
tensor-parallel ranks each has tokens."""

LAYOUTS = (
    "tp2 tp4 tp2-sp tp4-sp dp2 dp4 tp2-dp2 tp2-sp-dp2 "
    "pp2 pp4 pp2-dp2 tp2-pp2 tp2-sp-pp2 "
    "pp2-interleaved pp4-interleaved pp2-interleaved-dp2 tp2-pp2-interleaved "
    "tp2-sp-pp2-interleaved "
    "pp2-dualpipev pp4-dualpipev pp2-dualpipev-dp2 tp2-pp2-dualpipev tp2-sp-pp2-dualpipev "
    "pp4-zbh1 pp2-zbh1-dp2 tp2-sp-pp2-zbh1 pp2-dualpipev_zb"
).split()
"""Every way of laying a model out over up to four processes, ZeRO and the context aside."""

CONTEXT_LAYOUTS = (
    "cp2 cp2-a2a cp2-allgather cp4 cp4-a2a+p2p cp2-dp2 cp2-tp2 cp2-tp2-sp cp2-a2a-tp2-sp "
    "cp2-pp2 cp2-pp2-interleaved cp2-pp2-dualpipev cp2-pp2-zbh1"
).split()
"""The same where ranks divide sequences."""


def depth(layout: str) -> list[str]:
    """The flag of two blocks for each stage of a pipeline, and of four to eight."""
    parsed = parse_layout(layout)
    return ["--num-layers", str(min(8, max(4, 2 * parsed.pipeline * parsed.chunks)))]


SAVED_LAYOUTS = {
    "zero0": (1, ["--zero-stage", "0"]),
    "zero0-dp2": (2, ["--zero-stage", "0"]),
    "zero1-dp2-fp16": (2, ["--zero-stage", "1", "--fp16", "--initial-loss-scale", "65536"]),
    "zero2-dp2-bf16": (2, ["--zero-stage", "2", "--bf16"]),
    "zero3-dp2": (2, ["--zero-stage", "3"]),
    "zero1-tp2": (2, ["--zero-stage", "1", "--tensor-model-parallel-size", "2"]),
    "zero1-pp2": (2, ["--zero-stage", "1", "--pipeline-model-parallel-size", "2"]),
}
"""Number of processes and flags of layouts that save in different ways."""


def train(argv: list[str]) -> RunRecord:
    """Runs the trainer with these flags; for the pool."""
    return runs.train(argv)


def run(
    argv: list[str],
    under: Callable[..., contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *args: Any,
) -> tuple[str, str | None]:
    """Trains in the context ``under(*args)``, such as a disk that is full; what was printed, and
    the error that ended the run, if any. For the pool."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), under(*args):
        try:
            train(argv)
        except ValueError as error:
            return output.getvalue(), str(error)
    return output.getvalue(), None


def saved_again(argv: list[str]) -> None:
    """Load a checkpoint and save it; for the pool."""
    options = parse_run(None, argv)
    with distributed(options.config.parallel) as mesh:
        trainer = runs.watched_trainer(options, mesh, lambda result: None)
        manager = next(c for c in trainer.callbacks if isinstance(c, CheckpointManager))
        manager.save(trainer.iteration, trainer.consumed_samples)
        manager.writer.close()


def train_plainly(argv: Sequence[str], order: Sequence[int] | None = None) -> RunRecord:
    """The same training in plain torch; many tests of a file compare with the same one."""
    return _trained_plainly(tuple(argv), None if order is None else tuple(order))


@functools.cache
def _trained_plainly(argv: tuple[str, ...], order: tuple[int, ...] | None) -> RunRecord:
    return runs.PlainTraining(argv, order).run()


def gradients(argv: list[str]) -> GradientRecord:
    """One step in float64; for the pool."""
    return parity_gradients.gradients(argv)
