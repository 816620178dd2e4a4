"""Rates and decay of single parameters are the same in every layout."""

from functools import cache

import numpy as np
import pytest
from training_jobs import TINY, depth, train, train_plainly

from megatron.apps.parity.layouts import flags_for, parse_layout

FLAGS = (
    "--train-iters 4 --decoupled-lr 2e-3 --lr-group layers.1.*=0.5 --wd-group embedding.*=0 "
    "--wd-group *.mlp.*=2 --qk-layernorm --apply-wd-to-qk-layernorm --hidden-dropout 0 "
    "--attention-dropout 0 --untie-embeddings-and-output-weights"
).split()


@cache
def alone(*flags: str):
    """torch's AdamW with a group for each parameter, in a loop."""
    return train_plainly([*TINY, *FLAGS, *flags])


@pytest.mark.proof
@pytest.mark.parametrize("layout", [
    "tp2-dp2-zero1", "tp2", "pp2", "dp2", "dp2-zero1", "dp2-zero2", "dp2-zero3", "pp2-dp2-zero1",
    "cp2", "pp2-interleaved",
])  # fmt: skip
def test_layouts_train_alike(pool, layout):
    """The normal run has one in test_width.py."""
    parsed = parse_layout(layout)
    argv = [*TINY, *FLAGS, *flags_for(parsed), *depth(layout)]
    record = pool.run(parsed.processes, train, argv, timeout=300)[0]
    expected = alone(*depth(layout))
    np.testing.assert_allclose(record.losses, expected.losses, rtol=2e-6)
    np.testing.assert_allclose(record.norms, expected.norms, rtol=1e-4)
