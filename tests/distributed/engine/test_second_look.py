"""--rerun-on-anomaly: a step that is computed again leaves the same weights, at every ZeRO stage,
layout and dtype; a rank that computes wrongly, once or always, is named, and bad samples are."""

import contextlib
import io
import re
from unittest import mock

import numpy as np
import pytest
from samples import sampled
from training_jobs import TINY

from megatron.checkpoint.folder import complete_tags
from megatron.config.layouts import parse_layout
from megatron.parallel.layers import ParallelLinear
from megatron.parity import runs
from megatron.training import second_look
from megatron.util.errors import FaultError

RERUN = "--rerun-on-anomaly"
FP16 = ["--fp16", "--initial-loss-scale", "65536"]
SUMS = ["--bf16", "--accumulate-allreduce-grads-in-fp32"]
SAME = [
    *(("dp2", stage, flags) for stage in (0, 1, 2, 3) for flags in ([], ["--bf16"], FP16)),
    *((layout, 1, []) for layout in ("tp2", "tp2-sp-dp2", "pp2", "pp2-interleaved-dp2", "dp4")),
    ("pp2-dp2", 1, FP16),
    ("pp2-dp2", 0, []),
    ("dp2", 1, SUMS),
    ("dp2", 2, ["--use-precision-aware-optimizer", "--bf16"]),
    ("dp2", 2, ["--optimizer", "sgd"]),
    ("dp2", 1, ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"]),
    ("dp2", 3, ["--lora", "--lora-rank", "2"]),
]
OFF = [case for case in SAME if case[1] == 0 and case[2]]  # half precision needs ZeRO
SAME = [case for case in SAME if case not in OFF]


def layout_flags(layout, stage, more=()):
    parsed = parse_layout(layout)
    batch = str(2 * parsed.fewest_micro_batches * parsed.data)
    flags = [*TINY, "--num-layers", "8", "--global-batch-size", batch, *parsed.flags(), *more]
    return parsed.processes, [*flags, "--zero-stage", str(stage)]


def run(argv, under=contextlib.nullcontext, *args):
    """Trains in a context; what was printed, how it ended, and the record of a rank."""
    output, error, record = io.StringIO(), None, None
    with contextlib.redirect_stdout(output), under(*args):
        try:
            record = runs.train(argv)
        except FaultError as found:
            error = str(found)
    return output.getvalue(), error, record


def judging(answer):
    """A context in which a step that ``answer`` gives a reason for is an anomaly."""

    def anomaly(self, loss, norm):
        return answer.get(self._iteration)

    return mock.patch.object(second_look.SecondLook, "_anomaly", anomaly)


@pytest.mark.parametrize(
    ("layout", "stage", "flags"),
    sampled(SAME, [("dp2", 2, ["--bf16"]), ("pp2", 1, [])].__contains__),
)
def test_computed_again_the_weights_are_the_same(pool, layout, stage, flags):
    size, argv = layout_flags(layout, stage, flags)
    argv += ["--train-iters", "4"]
    plain = pool.run(size, run, argv)
    again = pool.run(size, run, [*argv, RERUN], judging, {2: "of the test", 3: "of the test"})
    assert again[0][0].count("the result is the same again") == 2, again[0][0]
    for (_, _, before), (_, error, after) in zip(plain, again, strict=True):
        assert error is None
        assert before.losses == after.losses and before.state.keys() == after.state.keys()
        for name, values in before.state.items():
            np.testing.assert_array_equal(values, after.state[name], err_msg=name)
