"""The planner's calls and bytes of a step against those that a training makes, axis by axis."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from poisoned_group import Call, calls, poisoned
from pool import Pool
from training_jobs import TINY, train

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.planning.parameters import rank_shares
from megatron.apps.planning.traffic import (
    Sent,
    sent_over_context,
    sent_over_data,
    sent_over_pipeline,
    sent_over_tensor,
)
from megatron.engine.train_engine import TrainEngine
from megatron.run.run import parse_run

FLAGS = [*TINY, "--train-iters", "2", "--hidden-dropout", "0", "--attention-dropout", "0"]
MICRO_BATCHES = 4
FEW = 4
"""Numbers of a call that a step compares or logs, which are not counted."""
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--qk-layernorm --untie-embeddings-and-output-weights"
).split()
CASES = {
    "tp2": [], "tp2-sp": [], "tp4-sp": LLAMA, "tp2-sp full": ["--recompute-granularity", "full"],
    "tp2 full": [*LLAMA, "--recompute-granularity", "full"], "pp2": [], "pp2-interleaved": LLAMA,
    "dp2": [], "cp2": [], "cp2-a2a": [], "cp2-allgather": LLAMA, "cp4-a2a+p2p": [],
}  # fmt: skip
SAMPLE = ("tp2-sp",)


def step(argv: list[str]) -> list[Call]:
    """Calls of the second step; for the pool."""
    ends, plain = [], TrainEngine.train_step

    def train_step(engine: TrainEngine, *args: object) -> object:
        ends.append(len(calls))
        result = plain(engine, *args)  # type: ignore[arg-type]
        ends.append(len(calls))
        return result

    with poisoned(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainEngine, "train_step", train_step)
        train(argv)
    return calls[ends[2] : ends[3]]


def counted(made: Sequence[Call]) -> Sent:
    large = [call for call in made if call.sent and call.numbers > FEW]
    return Sent(len(large), sum(call.sent for call in large))


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=() if x in SAMPLE else pytest.mark.proof) for x in CASES]
)
def test_calls_and_bytes(pool: Pool, case: str) -> None:
    layout = parse_layout(case.split()[0])
    deep = ["--num-layers", str(2 * layout.pipeline * layout.chunks)]
    argv = [*FLAGS, *deep, *CASES[case], "--zero-stage", "0"]
    config, flags = parse_run(None, argv).config, flags_for(layout)
    layout = replace(layout, recompute="uniform") if "full" in case else layout
    model, share = config.model, rank_shares(config.model, layout)[0]
    planned = (
        sent_over_tensor(model, layout, 1, MICRO_BATCHES, share, "eager"),
        sent_over_context(model, layout, 1, MICRO_BATCHES, share),
        sent_over_pipeline(model, layout, 1, MICRO_BATCHES, share),
        sent_over_data(layout, share),
    )
    most = max(
        map(counted, pool.run(layout.processes, step, [*argv, *flags])), key=lambda sent: sent.bytes
    )
    assert most.calls == sum(sent.calls for sent in planned)
    assert most.bytes == pytest.approx(sum(sent.bytes for sent in planned))
