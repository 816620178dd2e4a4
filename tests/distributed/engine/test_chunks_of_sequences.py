"""FPDT (attention, MLP and loss in chunks of a sequence) with other ways to divide a model: each
trains as one process that computes whole sequences does."""

import numpy as np
import pytest
from training_jobs import TINY, train

FLAGS = [
    *TINY,
    *"--num-layers 4 --num-query-groups 2 --swiglu --position-embedding-type rope".split(),
    *"--normalization RMSNorm --hidden-dropout 0 --attention-dropout 0 --train-iters 2".split(),
    *"--global-batch-size 4 --lr 1e-3".split(),
]
CHUNKS = "--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size 4".split()
ON_HOST = "--ds-sequence-parallel-fpdt-offloading"
TENSOR, PIPELINE = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "tp2": (2, TENSOR),
    "tp2-sp-zero1": (2, f"{TENSOR} --sequence-parallel --zero-stage 1"),
    "pp2": (2, PIPELINE),
    "pp2-host": (2, f"{PIPELINE} {ON_HOST} --recompute-granularity full"),
    "pp2-interleaved": (2, f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1 --zero-stage 1"),
    "pp2-tp2-sp": (4, f"{TENSOR} --sequence-parallel {PIPELINE} --zero-stage 1"),
    "pp2-cp2-a2a": (4, f"{PIPELINE} --context-parallel-size 2 --cp-comm-type a2a"),
    "tp2-cp2-a2a-host": (
        4, f"{TENSOR} --sequence-parallel --context-parallel-size 2 --cp-comm-type a2a {ON_HOST}",
    ),
    "tp2-zero3": (4, f"{TENSOR} --zero-stage 3"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(pool):
    return pool.run(1, train, FLAGS)[0]


@pytest.mark.parametrize(
    "name",
    [n if n == "pp2-tp2-sp" else pytest.param(n, marks=pytest.mark.proof) for n in LAYOUTS],
)
def test_chunks_in_every_layout(pool, whole, name):
    size, flags = LAYOUTS[name]
    ranks = pool.run(size, train, [*FLAGS, *CHUNKS, *flags.split()])
    np.testing.assert_allclose(ranks[0].losses, whole.losses, rtol=2e-6)
    np.testing.assert_allclose(ranks[0].norms, whole.norms, rtol=1e-5)
