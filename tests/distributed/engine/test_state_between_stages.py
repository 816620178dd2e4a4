"""Encoder output and an auxiliary loss travel between pipeline stages next to the hidden states:
losses, gradients and evaluations of an encoder-decoder in float64, against one process."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import islice
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from configs import model_config
from pool import tensor_group
from samples import sampled
from torch import Tensor
from toy_encoder_decoder import COUNTS, VOCAB, draw_batches, fill, toy_spec
from training_jobs import TINY

from megatron.config import PrecisionConfig
from megatron.engine.build import build_engine
from megatron.engine.deepspeed_json import complete
from megatron.engine.environment import distributed, training_device
from megatron.engine.pipeline_module import Boundary, check_agreement
from megatron.model.layer_list import LayerStack
from megatron.parallel.mesh import ALONE, Coordinates
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import Run, parse_run

MICRO_BATCHES = 4
FLAGS = [
    *TINY, "--num-layers", "4", "--zero-stage", "0", "--vocab-size", str(VOCAB),
    "--make-vocab-size-divisible-by", "2", "--hidden-dropout", "0", "--attention-dropout", "0",
    "--global-batch-size", "4", "--train-iters", "1",
]  # fmt: skip
LAYOUTS = {
    "1f1b": (2, "--pipeline-model-parallel-size 2"),
    "four-stages": (4, "--pipeline-model-parallel-size 4"),
    "interleaved": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved"),
    "dualpipev": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipev"),
    "recomputed": (
        2,
        "--pipeline-model-parallel-size 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "tensor": (2, "--tensor-model-parallel-size 2"),
    "sequence-pipeline": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--pipeline-schedule dualpipev",
    ),
    "tensor-pipeline": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


class Outcome(NamedTuple):
    """Mean losses by name, gradients by canonical name, evaluated losses and counts."""

    losses: dict[str, float]
    gradients: dict[str, Tensor]
    evaluated: dict[str, float]
    counts: dict[str, float]
    place: Coordinates


def run_of(flags: str) -> Run:
    run = parse_run(None, [*FLAGS, *flags.split()])
    config = dataclasses.replace(run.config, precision=PrecisionConfig())
    return dataclasses.replace(run, config=config, content=complete({}, config))


def step(flags: str) -> Outcome:
    """A step and two evaluations of a layout; for the pool."""
    run = run_of(flags)
    with distributed(run.config.parallel) as mesh:
        spec = toy_spec(run.config.model)
        engine = build_engine(run.config, run.content, spec, mesh, training_device())
        engine.model.double()
        for param, name in engine.names.items():
            fill(name, param, TensorParallel(mesh.tensor))
        engine.engine.allreduce_gradients = lambda **_: None  # there is one data rank
        engine.prepare(MICRO_BATCHES)
        sums = engine.backend.accumulate(draw_batches(), [None] * MICRO_BATCHES)
        losses = engine.mean_losses(sums, MICRO_BATCHES)
        evaluated = engine.evaluate(draw_batches(), MICRO_BATCHES)
        counts = {}
        if mesh.tensor.size == 1:
            counts = engine.evaluate(draw_batches(), MICRO_BATCHES, COUNTS)
        gradients = {
            name: param.grad.clone()
            for param, name in engine.names.items()
            if param.grad is not None
        }
        engine.close()
        return Outcome(
            {name: float(loss) for name, loss in losses.items()},
            gradients, evaluated, counts, mesh.coordinates,
        )  # fmt: skip


@cache
def reference() -> tuple[Outcome, dict]:
    """One process without an engine; and how each parameter is cut."""
    config = run_of("").config
    spec = toy_spec(config.model)
    stack = LayerStack(spec.layers(TensorParallel()), config.parallel).double()
    params = dict(stack.canonical_parameters())
    for name, param in params.items():
        fill(name, param, TensorParallel())
    losses, counts = dict.fromkeys(spec.losses, 0.0), dict.fromkeys(COUNTS.names, 0.0)
    for batch in islice(draw_batches(), MICRO_BATCHES):
        after = stack(spec.begin(batch))
        (sum(w * after.losses[n] for n, w in spec.losses.items()) / MICRO_BATCHES).backward()
        for name, loss in after.losses.items():
            losses[name] += float(loss.detach()) / MICRO_BATCHES
        logits = stack(COUNTS.start(spec.begin(batch))).hidden[..., :VOCAB]
        hits = logits.argmax(-1) == batch.labels_BT
        counts["correct"] += float(hits.sum()) / MICRO_BATCHES
        counts["counted"] += hits.numel() / MICRO_BATCHES
    shards = {name: shard_of(param) for name, param in params.items()}
    gradients = {name: shards[name].join([param.grad]) for name, param in params.items()}
    return Outcome(losses, gradients, losses, counts, ALONE), shards


SAMPLE = {"four-stages", "interleaved", "recomputed", "sequence-pipeline"}
"""Each schedule, a tensor axis, and blocks computed again."""


@pytest.mark.parametrize("layout", sampled(LAYOUTS, SAMPLE.__contains__))
def test_against_one_process(pool, layout):
    size, flags = LAYOUTS[layout]
    (expected, shards), seen = reference(), set()
    largest = max(float(grad.abs().max()) for grad in expected.gradients.values())
    for found in pool.run(size, step, flags):
        assert found.losses == pytest.approx(expected.losses, rel=1e-12)
        assert found.evaluated == pytest.approx(expected.losses, rel=1e-12)
        if found.counts:
            assert found.counts == pytest.approx(expected.counts, rel=1e-12)
        for name, grad in found.gradients.items():
            share = shards[name].cut(expected.gradients[name], found.place)
            bound = 1e-12 * max(float(share.abs().max()), 1e-3 * largest)
            assert float((grad - share).abs().max()) <= bound, name
            seen.add(name)
    assert seen == expected.gradients.keys()


def different_views() -> str:
    """What two ranks say that expect different shapes; for the pool."""
    group = tensor_group()
    hidden = Boundary.of({"hidden": (2, 8, 32)}, torch.float32)
    check_agreement([hidden, hidden], group)
    other = {"hidden": (2, 8, 32), "encoder": (2, 16 + group.rank, 32)}
    with pytest.raises(AssertionError) as caught:
        check_agreement([hidden, Boundary.of(other, torch.float32)], group)
    dist.barrier()
    return str(caught.value)


def test_ranks_that_expect_different_tensors_are_told(pool):
    for said in pool.run(2, different_views):
        assert said.startswith("between pipeline stages 1 and 2 rank 0 of the pipeline expects")
        assert "(2, 16, 32)" in said and "rank 1 Boundary" in said and "(2, 17, 32)" in said


def test_a_layer_that_gives_another_shape_is_named():
    state = toy_spec(model_config(hidden_size=4)).begin(next(draw_batches()))
    boundary = Boundary.of({"hidden": (2, 16, 4)}, torch.float32)
    with pytest.raises(AssertionError, match=r"hidden is \(\(2, 16\), torch.int64\)"):
        boundary.taken_from(state)


def test_ranks_compare_once_a_shape(pool):
    assert pool.run(2, comparisons) == [1, 1]


def comparisons() -> int:
    """How often a run's ranks compare; for the pool."""
    from megatron.engine import pipeline_executor

    calls, real = [], pipeline_executor.check_agreement
    pipeline_executor.check_agreement = lambda *args: (calls.append(args), real(*args))
    try:
        run = run_of("--pipeline-model-parallel-size 2")
        with distributed(run.config.parallel) as mesh:
            spec = toy_spec(run.config.model)
            engine = build_engine(run.config, run.content, spec, mesh, training_device())
            for number in range(3):
                engine.train_step(draw_batches(number), MICRO_BATCHES, 0, 1e-3, 0.0)
                engine.evaluate(draw_batches(number), 2)
            engine.close()
        return len(calls)
    finally:
        pipeline_executor.check_agreement = real
