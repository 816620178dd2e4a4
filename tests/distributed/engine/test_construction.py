"""At ZeRO stage 3 no process ever holds the whole model, under tensor parallelism as well."""

import re
from pathlib import Path

import pytest
from pool import Pool
from training_jobs import TINY

from megatron.engine.build import build_engine
from megatron.engine.environment import distributed, training_device
from megatron.families import spec_of
from megatron.run.run import parse_run

SHAPE = "--num-layers 8 --hidden-size 640 --num-attention-heads 8 --vocab-size 8000".split()
FLAGS = [*TINY, *SHAPE, "--train-iters", "1"]


def resident(which):
    """Bytes of this process in memory: now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+) kB", status)[1]) * 1024


def growth(argv):
    """Bytes that building an engine needs at its peak, and those of the whole model's weights."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = resident("VmRSS")
        engine = build_engine(
            run.config,
            run.content,
            spec_of(run.config.model, run.config.parallel),
            mesh,
            training_device(),
        )
        peak = resident("VmHWM") - before
        whole = sum(p.shard.full_shape[0] * (p.shard.full_shape + (1,))[1] for p in engine.names)
        engine.close()
        return peak, 4 * whole


def in_new_processes(size, argv):
    """Not in the shared pool: memory that earlier tests freed would be used again, unseen."""
    pool = Pool()
    try:
        return pool.run(size, growth, argv)
    finally:
        pool.close()


@pytest.mark.parametrize("layout", [pytest.param("data", marks=pytest.mark.proof), "tensor"])
def test_four_processes_share_what_one_would_need(layout):
    """Weights, their float32 copies and gradients: a quarter each, and the largest parameter."""
    tensor = ["--tensor-model-parallel-size", "2"] if layout == "tensor" else []
    # A folder in DeepSpeed's format is of stage 3: on one rank, too, the engine runs that then.
    at_stage_3 = ["--zero-stage", "3", "--checkpoint-format", "deepspeed"]
    ((alone, whole),) = in_new_processes(1, [*FLAGS, *at_stage_3])
    peaks = in_new_processes(4, [*FLAGS, *tensor, "--zero-stage", "3"])
    shared = max(peak for peak, _ in peaks)
    print(f"weights {whole / 1e6:.0f} MB; peak alone {alone / 1e6:.0f}, of four {shared / 1e6:.0f}")
    assert alone > 2 * whole, "the measurement must see it"
    assert shared < 0.5 * alone
