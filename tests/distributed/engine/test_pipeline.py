"""What a pipeline really does: the order it executes, its bubble, and offload."""

import contextlib
import json
import time

import pytest
from samples import sampled
from training_jobs import TINY, train, train_plainly

from megatron.apps.planning.pipeline_times import step_length, theory, waiting_ratio
from megatron.data.loader import MicroBatches
from megatron.engine import pipeline_executor
from megatron.engine.build import build_engine
from megatron.engine.environment import distributed, training_device
from megatron.families import spec_of
from megatron.parallel.later_products import add_products
from megatron.parallel.pipeline_schedules import PipelineSchedule
from megatron.parallel.timeline import simulate
from megatron.run.run import parse_run, run_data

EXPERTS = "--num-experts 4 --moe-router-topk 2".split()
FULL = "--recompute-granularity full --recompute-method uniform".split()
FLAGS = [*TINY, "--num-layers", "8", "--global-batch-size", "8", "--train-iters", "1"]
OTHERS = [("dualpipev_zb", 2), ("dualpipev", 2), ("zbh1", 1)]


@contextlib.contextmanager
def engine_and_batches(argv):
    """The engine of a rank, and its micro batches."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        engine = build_engine(
            run.config,
            run.content,
            spec_of(run.config.model, run.config.parallel),
            mesh,
            training_device(),
        )
        datasets, collate = run_data(run)[:2]
        data = mesh.samples
        yield (
            engine,
            MicroBatches(
                datasets.train,
                collate,
                micro_batch_size=1,
                data_rank=data.rank,
                data_size=data.size,
            ),
        )
        engine.close()


def executed(argv):
    """The passes of one step on this rank, in the order in which they ran; for the pool."""
    with engine_and_batches(argv) as (engine, batches):
        engine.train_step(batches, 8, 0, 1e-3, 0)
        return engine.engine.executed


def executed_timeline(pool, name, chunks):
    layout = ["--pipeline-model-parallel-size", "4", "--pipeline-schedule", name]
    orders = pool.run(4, executed, [*FLAGS, *layout])
    return simulate(PipelineSchedule(name, 4, chunks, 8), orders=orders)


def test_interleaving_shrinks_the_bubble(pool):
    """As theory says, (p - 1) / (v m), counted from what ran."""
    plain = executed_timeline(pool, "1f1b", 1)
    interleaved = executed_timeline(pool, "interleaved", 2)
    print(f"bubble of 1f1b {waiting_ratio(plain)}, of interleaved {waiting_ratio(interleaved)}")
    assert waiting_ratio(plain) == theory("1f1b", 4, 1, 8) == 3 / 8
    assert waiting_ratio(interleaved) == theory("interleaved", 4, 2, 8) == 3 / 16


@pytest.mark.parametrize("name, chunks", sampled(OTHERS, OTHERS[0].__eq__))
def test_every_pass_in_its_order(pool, name, chunks):
    timeline = executed_timeline(pool, name, chunks)
    schedule = PipelineSchedule(name, 4, chunks, 8)
    for rank in range(4):
        slots = [slot.action for slot in timeline.slots if slot.rank == rank]
        assert slots == list(schedule.actions(rank))


def slept(argv, unit, chunks):
    """Seconds of a step in which each pass of this rank also sleeps: a forward through all stages
    of a rank for ``unit`` seconds, a backward for two, each part of one for one; for the pool."""
    with engine_and_batches(argv) as (engine, batches):
        executor = engine.engine

        def sleeping(run):
            def slow(action):
                run(action)  # which waits for what it needs
                time.sleep(unit * (2 if action.backward and not action.part else 1) / chunks)

            return slow

        engine.train_step(batches, 8, 0, 1e-3, 0)
        for name in ("forward_pass", "backward_pass", "weight_pass"):
            setattr(executor, name, sleeping(getattr(executor, name)))
        start = time.perf_counter()
        engine.train_step(batches, 8, 8, 1e-3, 0)
        return time.perf_counter() - start


@pytest.mark.proof
def test_idle_time_of_runs(pool):
    """Steps of four ranks whose passes mostly sleep, which several processes can do on one core:
    they take the simulated times and what the passes really compute."""
    unit, seconds, spans = 0.25, {}, {}
    for name, chunks in [("1f1b", 1), ("interleaved", 2), *OTHERS]:
        layout = ["--pipeline-model-parallel-size", "4", "--pipeline-schedule", name]
        argv = [*FLAGS, "--train-iters", "2", *layout]
        seconds[name] = max(pool.run(4, slept, argv, unit, chunks))
        spans[name] = float(step_length(simulate(PipelineSchedule(name, 4, chunks, 8))))
        print(f"{name}: {seconds[name]:.2f} s, simulated {unit * spans[name]:.2f} s")
    for name, simulated in spans.items():
        assert unit * simulated < seconds[name] < 1.25 * unit * simulated
    first, *_, last = sorted(seconds, key=seconds.__getitem__)
    assert (first, last) == ("dualpipev_zb", "1f1b") and seconds["zbh1"] < seconds["dualpipev"]


def products(argv):
    """The numbers of products that the passes of weights on this rank have left; for the pool."""
    counts = []

    def counted(left):
        counts.append(len(left))
        add_products(left)

    pipeline_executor.add_products = counted
    try:
        with engine_and_batches(argv) as (engine, batches):
            engine.train_step(batches, 8, 0, 1e-3, 0)
    finally:
        pipeline_executor.add_products = add_products
    return counts


@pytest.mark.parametrize("more, each", [([], 4), (EXPERTS, 3), (FULL, 4)])
@pytest.mark.proof
def test_every_linear_layer_is_left(pool, more, each):
    """Two blocks a stage: queries with keys and values, their projection, and the MLP's two, which
    are one function with experts."""
    argv = [
        *FLAGS,
        *more,
        *"--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule zbh1".split(),
    ]
    assert pool.run(2, products, argv) == [[], [2 * each] * 8]


def tied_table(argv):
    """The token embedding on this rank after some steps, None without one; for the pool."""
    with engine_and_batches(argv) as (engine, batches):
        for step in range(12):
            engine.train_step(batches, 2, 6 * step, 1e-2, 0.1)
        tables = [
            param.detach().float().numpy().copy()
            for param, name in engine.names.items()
            if name == "embedding.word_embeddings.weight"
        ]
        return tables[0] if tables else None


PRECISIONS = [["--zero-stage", "0"], ["--zero-stage", "1", "--bf16"]]


@pytest.mark.parametrize("precision", sampled(PRECISIONS, PRECISIONS[1].__eq__))
def test_copies_of_the_tied_table_stay_equal_bit_by_bit(pool, precision):
    """With three data ranks, whose gradients are summed in an order that depends on the bucket, and
    buckets that differ between the stages. Only the first copy is saved."""
    flags = [*TINY, "--vocab-size", "1999", "--num-layers", "4", "--pipeline-partition", "3,1"]
    flags += ["--global-batch-size", "6", "--train-iters", "12", *precision]
    first, *others = pool.run(6, tied_table, [*flags, "--pipeline-model-parallel-size", "2"])
    assert len(others) == 5
    for table in others:
        assert (table == first).all()


@pytest.mark.parametrize(
    "partition", sampled(["2,1,2,3", "parameters", "blocks"], "2,1,2,3".__eq__)
)
def test_uneven_stages(pool, partition):
    """Stages of unequal sizes train alike; also nine blocks over four stages."""
    blocks = "8" if partition[0] == "2" else "9"
    flags = [*FLAGS, "--num-layers", blocks, "--train-iters", "3"]
    expected = train_plainly(flags)
    layout = ["--pipeline-model-parallel-size", "4", "--pipeline-partition", partition]
    record = pool.run(4, train, [*flags, *layout, "--zero-stage", "1"])[0]
    assert record.losses == pytest.approx(expected.losses, rel=1e-6)
    assert record.norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize("schedule", sampled(["1f1b", "interleaved"], "1f1b".__ne__))
def test_offloaded_optimizer(pool, tmp_path, schedule):
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    flags = [*FLAGS, "--train-iters", "4"]
    expected = train_plainly(flags)
    layout = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
    config = ["--deepspeed_config", str(tmp_path / "ds.json")]
    record = pool.run(4, train, [*flags, *layout, *config])[0]
    assert record.losses == pytest.approx(expected.losses, rel=1e-6)
    assert record.norms == pytest.approx(expected.norms, rel=1e-5)


def test_ramp_up_and_evaluation(pool):
    """Steps of 4, 6 and 8 micro batches, and evaluations between them."""
    flags = [*TINY, "--num-layers", "4", "--rampup-batch-size", "4", "2", "16"]
    flags += ["--global-batch-size", "8", "--train-samples", "48", "--lr-warmup-samples", "4"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    expected = train_plainly(flags)
    flags += ["--eval-interval", "2", "--eval-iters", "1", "--zero-stage", "1"]
    layout = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "interleaved"]
    record = pool.run(2, train, [*flags, *layout])[0]
    assert len(record.losses) > 6, "without the ramp there were 6 steps"
    assert record.losses == pytest.approx(expected.losses, rel=1e-5)
