"""z-loss is the same in every layout: vocabulary cut, sequence cut, pipelines, ZeRO."""

import numpy as np
import pytest
from training_jobs import TINY, depth, train, train_plainly

from megatron.apps.parity.layouts import flags_for, parse_layout

FLAGS = [
    *TINY,
    *"--train-iters 4 --hidden-dropout 0 --attention-dropout 0 --z-loss-coeff 1e-2".split(),
]
LAYOUTS = ("tp2", "tp2-sp", "tp4", "pp2", "dp2-zero1", "dp2-zero2", "dp2-zero3", "cp2",
           "tp2-pp2", "pp2-interleaved", "tp2-dp2-zero1", "dp2-zero0")  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike(pool, layout):
    """The normal run has one in test_width.py."""
    parsed = parse_layout(layout)
    argv = [*FLAGS, *depth(layout)]
    record = pool.run(parsed.processes, train, [*argv, *flags_for(parsed)], timeout=300)[0]
    alone = train_plainly(argv)
    np.testing.assert_allclose(record.losses, alone.losses, rtol=2e-6)
    np.testing.assert_allclose(record.norms, alone.norms, rtol=1e-4)


def test_a_run_minimises_the_sum():
    """Logits are about 0 at first, so that Z is the size of the vocabulary, 100 tokens."""
    plain, record = train_plainly(FLAGS[:-2]).losses[0], train(FLAGS)
    assert record.losses[0] == pytest.approx(plain + 0.01 * np.log(100) ** 2, abs=5e-3)
