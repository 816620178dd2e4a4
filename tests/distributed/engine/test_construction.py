"""At ZeRO stage 3 no process ever holds the whole model, under tensor parallelism as well."""

import pytest
from peak_bytes import PeakBytes
from training_jobs import TINY

from megatron.engine.build import build_engine
from megatron.engine.environment import distributed, training_device
from megatron.families import spec_of
from megatron.run.run import parse_run

SHAPE = "--num-layers 8 --hidden-size 640 --num-attention-heads 8 --vocab-size 8000".split()
FLAGS = [*TINY, *SHAPE, "--train-iters", "1"]


def growth(argv):
    """Bytes of tensors that exist at once while an engine is built, and of all weights."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        spec = spec_of(run.config.model, run.config.parallel)
        with PeakBytes() as tensors:
            engine = build_engine(run.config, run.content, spec, mesh, training_device())
        peak = tensors.peak + tensors.host_peak
        whole = sum(p.shard.full_shape[0] * (p.shard.full_shape + (1,))[1] for p in engine.names)
        engine.close()
        return peak, 4 * whole


@pytest.mark.parametrize("layout", [pytest.param("data", marks=pytest.mark.proof), "tensor"])
def test_four_processes_share_what_one_would_need(pool, layout):
    """Weights, their float32 copies and gradients: a quarter each, and the largest parameter."""
    tensor = ["--tensor-model-parallel-size", "2"] if layout == "tensor" else []
    # A folder in DeepSpeed's format is of stage 3: on one rank, too, the engine runs that then.
    at_stage_3 = ["--zero-stage", "3", "--checkpoint-format", "deepspeed"]
    ((alone, whole),) = pool.run(1, growth, [*FLAGS, *at_stage_3])
    peaks = pool.run(4, growth, [*FLAGS, *tensor, "--zero-stage", "3"])
    shared = max(peak for peak, _ in peaks)
    print(f"weights {whole / 1e6:.0f} MB; peak alone {alone / 1e6:.0f}, of four {shared / 1e6:.0f}")
    assert alone > 2 * whole, "the measurement must see it"
    assert shared < 0.4 * alone
