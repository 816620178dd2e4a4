"""--rerun-on-anomaly: a step that is computed again leaves the same weights, at every ZeRO stage,
layout and dtype; a rank that computes wrongly, once or always, is named, and bad samples are."""

import contextlib
import io
import re
from math import inf
from unittest import mock

import numpy as np
import pytest
from samples import sampled
from training_jobs import TINY

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.apps.parity import runs
from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.folder import complete_tags
from megatron.engine.train_engine import TrainEngine
from megatron.features.resilience.steps import second_look
from megatron.model.mlp import MLP
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
    ("cp2", 1, []),
    ("cp2-dp2", 3, []),
]
OFF = [case for case in SAME if case[1] == 0 and case[2] == ["--bf16"]]  # the same as float32
SAME = [case for case in SAME if case not in OFF]


def layout_flags(layout, stage, more=()):
    parsed = parse_layout(layout)
    batch = str(2 * parsed.fewest_micro_batches * parsed.data)
    flags = [*TINY, "--num-layers", "8", "--global-batch-size", batch, *flags_for(parsed), *more]
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
@pytest.mark.proof
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


BAD = 3
"""The step that is an anomaly."""


@contextlib.contextmanager
def perturbed(rank, always, factor):
    """The products of one rank's MLPs are too large in the step BAD: the first time that it is
    computed, or every time if ``always``."""
    attempts, forward, attempt = [], MLP.forward, second_look.SecondLook._attempt

    def attempted(self, *args):
        attempts.append(self._iteration)
        own = self._engine.mesh.world.rank == rank and self._iteration == BAD
        self._engine.model.wrong = own and (always or attempts.count(BAD) == 1)
        wrong[0] = self._engine.model.wrong
        return attempt(self, *args)

    wrong = [False]

    def too_large(self, x):
        return forward(self, x) * (factor if wrong[0] else 1.0)

    with (
        judging({BAD: "of the test"}),
        mock.patch.object(second_look.SecondLook, "_attempt", attempted),
        mock.patch.object(MLP, "forward", too_large),
    ):
        yield


FAULTS = [
    # layout, stage, rank, whether always, factor: who is named
    ("dp2", 1, 1, False, 1.1, r"rank 1 \(\S+\) computes wrongly \(once\)"),
    ("dp4", 0, 2, False, 1.1, r"rank 2 \(\S+\) computes wrongly \(once\)"),
    ("dp2", 3, 0, False, 1.1, r"rank 0 \(\S+\) computes wrongly \(once\)"),
    ("tp2-dp2", 1, 3, False, 1.1, r"one of the ranks of one model rank 2 .*, rank 3 .*\(once\)"),
    ("pp2-dp2", 1, 1, False, 1.1, r"one of the ranks of one model rank 1 .*, rank 3 .*\(once\)"),
    ("dp4", 1, 2, True, 1.1, r"rank 2 \(\S+\) computes wrongly \(every time\)"),
    ("dp4", 3, 0, True, 1.1, r"rank 0 \(\S+\) computes wrongly \(every time\)"),
    ("dp2", 2, 1, True, inf, r"rank 1 \(\S+\) computes wrongly \(every time\)"),
    ("dp2", 0, 0, True, inf, r"rank 0 \(\S+\) computes wrongly \(every time\)"),
    ("cp2-dp2", 1, 1, False, 1.1, r"one of the ranks of one model rank 0 .*, rank 1 .*\(once\)"),
    ("tp2-dp2", 0, 1, True, inf, r"one of the ranks of one model rank 0 .*, rank 1 .*every time"),
]


@pytest.mark.parametrize(
    ("layout", "stage", "rank", "always", "factor", "words"),
    sampled(FAULTS, lambda case: case[:4] in (("dp4", 0, 2, False),)),
)
def test_a_rank_that_computes_wrongly_is_named(
    pool, tmp_path, layout, stage, rank, always, factor, words
):
    size, argv = layout_flags(layout, stage)
    argv += ["--train-iters", "5", RERUN, "--save", str(tmp_path), "--save-interval", "1"]
    for _, error, _ in pool.run(size, run, argv, perturbed, rank, always, factor):
        assert error is not None
        assert re.search(rf"iteration {BAD} is computed again.*: {words}", error), error
    assert complete_tags(tmp_path) == [f"global_step{n}" for n in range(1, BAD)]


@pytest.mark.proof
def test_report_stats_only_names_it(pool):
    size, argv = layout_flags("dp2", 1)
    argv += ["--train-iters", "5", "--rerun-mode", "report_stats"]
    plain = pool.run(size, run, argv[:-2])
    found = pool.run(size, run, argv, perturbed, 1, False, 1.1)
    assert re.search(r"WARNING: .*rank 1 \(\S+\) computes wrongly \(once\)", found[0][0])
    # The update is that of the right result.
    assert [error for _, error, _ in found] == [None, None]
    assert found[1][2].losses == plain[1][2].losses


LENGTH, SAMPLES, RANDOM = 16, 440, (160, 250, 340)
DATA = [*TINY, "--num-layers", "1", "--train-iters", "100", "--spike-window", "20", RERUN]
DATA = [flag for flag in DATA if flag != "--mock-data"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Documents of about a sample each, all of the same tokens; three of them are random."""
    found = str(tmp_path_factory.mktemp("data") / "equal")
    random = np.random.default_rng(1)
    with IndexedDatasetWriter(found, np.uint16) as writer:
        for number in range(SAMPLES):
            tokens = np.arange(LENGTH) % 2
            if number in RANDOM:
                tokens = random.integers(0, 90, LENGTH)
            writer.add_document([tokens.astype(np.uint16)])
    return found


def test_bad_samples_are_named(pool, prefix):
    """The samples that stand out have documents that are random."""
    argv = [*DATA, "--data-path", prefix, "--split", "100,0,0", "--hidden-dropout", "0"]
    argv += ["--attention-dropout", "0", "--lr", "3e-3", "--lr-decay-style", "constant"]
    output, error, _ = pool.run(2, run, [*argv, "--zero-stage", "1"])[0]
    assert error is None
    found = re.findall(r"sample (\d+) \(--skip-samples .*\): (.*): '", output)
    assert found and "bad data: " in output, output
    for _, pieces in found:
        documents = {int(number) for number in re.findall(r"document (\d+) tokens", pieces)}
        assert documents & set(RANDOM), pieces


@contextlib.contextmanager
def high_rate(step):
    """The learning rate of one step is far too high."""
    real, done = TrainEngine.train_step, iter(range(1, 1000))

    def train_step(self, batches, micro_batches, consumed, lr, decay):
        lr = 3.0 if next(done) == step else lr
        return real(self, batches, micro_batches, consumed, lr, decay)

    with mock.patch.object(TrainEngine, "train_step", train_step):
        yield


@pytest.mark.proof
def test_a_training_that_diverges_is_not_blamed_on_data(pool):
    argv = [*TINY, "--train-iters", "40", "--spike-window", "20", RERUN]
    output, error, _ = pool.run(2, run, [*argv, "--zero-stage", "1"], high_rate, 35)[0]
    assert error is None
    assert re.search("iteration 36 is computed again .*since loss", output), output
    assert "the result is the same again, on any rank; the training diverges" in output
