"""The norm of micro batches' gradients is that of autograd, in every layout, and changes no run."""

import json

import numpy as np
import pytest
from training_jobs import TINY, depth, train

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.features.noise_scale.callback import Estimate
from megatron.run.run import parse_run

FLAGS = [
    *TINY,
    *"--train-iters 3 --hidden-dropout 0 --attention-dropout 0 --log-interval 1".split(),
    "--untie-embeddings-and-output-weights",
]
NOISE = ["--gradient-noise-interval", "1"]
LAYOUTS = ("tp2", "tp2-sp", "pp2", "dp2-zero0", "dp2-zero1", "dp2-zero2", "dp2-zero3", "tp2-pp2",
           "tp2-dp2-zero1", "pp2-interleaved")  # fmt: skip
SAMPLE = ("tp2-dp2-zero1",)


def scales(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["gradient_noise_scale"] for row in rows if "gradient_noise_scale" in row]


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in SAMPLE else pytest.mark.proof) for x in LAYOUTS]
)
def test_layouts_measure_alike(pool, layout, tmp_path):
    """One sample a micro batch, whose gradients the test has from runs of a batch of one sample."""
    parsed = parse_layout(layout)
    argv = [*FLAGS, *NOISE, *depth(layout)]
    one, other = tmp_path / "one", tmp_path / "other"
    alone = train([*argv, "--metrics-file", str(one)])
    flags = [*argv, *flags_for(parsed), "--metrics-file", str(other)]
    pool.run(parsed.processes, train, flags, timeout=300)
    assert alone.losses == train([*FLAGS, *depth(layout)]).losses
    np.testing.assert_allclose(scales(other), scales(one), rtol=1e-3)
    estimate = Estimate()
    batch_of_one = ["--global-batch-size", "1", "--train-iters", "4", "--clip-grad", "0"]
    still = train([*FLAGS, *depth(layout), *batch_of_one, "--lr", "1e-30", "--weight-decay", "0"])
    estimate.add(1, float(np.square(still.norms).mean()), 4, alone.norms[0] ** 2)
    assert scales(one)[0] == pytest.approx(estimate.samples, rel=1e-3)
    assert parse_run(None, argv).config.training.micro_batch_size == 1
