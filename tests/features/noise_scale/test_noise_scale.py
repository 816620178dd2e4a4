"""The gradient noise scale: its estimate against gradients with a known one."""

import pytest
import torch

from megatron.config import ConfigError
from megatron.features.noise_scale.callback import Estimate
from megatron.run.run import parse_run

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 2 --tokenizer-type NullTokenizer --vocab-size "
    "30 --mock-data --gradient-noise-interval 1"
).split()


def test_the_estimate_of_gaussian_gradients():
    """Gradients g + noise of variance s^2 a sample in n dimensions: n s^2 / |g|^2."""
    draw, estimate = torch.Generator().manual_seed(3), Estimate()
    true = torch.linspace(0.0, 1.0, 400)
    for _ in range(60):
        samples = true + 3.0 * torch.randn(32, 400, generator=draw)
        small = samples.view(8, 4, 400).mean(1)
        estimate.add(4, float(small.square().sum(1).mean()), 32, float(samples.mean(0).norm() ** 2))
    assert estimate.samples == pytest.approx(400 * 9 / float(true.square().sum()), rel=0.1)


def test_no_estimate_without_a_signal():
    estimate = Estimate()
    assert estimate.samples is None
    estimate.add(1, 4.0, 4, 0.5)  # large batches smaller than noise alone
    assert estimate.samples is None


@pytest.mark.parametrize("flags, message", [
    ("--global-batch-size 1", "--gradient-noise-interval 1 compares the gradients"),
    ("--fp16", "--gradient-noise-interval 1 contradicts --fp16"),
    ("--gradient-noise-interval 0", "--gradient-noise-interval 0 must"),
])  # fmt: skip
def test_runs_without_it_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse_run(None, [*FLAGS, *flags.split()])
