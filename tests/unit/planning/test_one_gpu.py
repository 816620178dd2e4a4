"""The estimate of one GPU, and its table in the documentation."""

from pathlib import Path

import pytest

from megatron.planning import one_gpu
from megatron.planning.one_gpu import GPUS, TRAININGS, Gpu, Training, seconds_per_token

ROOT = Path(__file__).parents[3]


def test_the_page_has_the_table():
    """``python -m megatron.planning.one_gpu`` prints it."""
    assert one_gpu.markdown() in (ROOT / "docs/guides/gpu.md").read_text()


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_linear_layers_and_attention_are_all_model_flops(training):
    """With nothing but FLOPs, at rates that products and attention reach, the time is theirs."""
    shape = training.shape
    products = 6 * training.block_parameters + 6 * shape.padded_vocab_size * shape.hidden_size
    attention = 6 * shape.num_layers * shape.num_attention_heads * shape.kv_channels
    attention *= shape.seq_length  # causal: half of all pairs
    assert products + attention == pytest.approx(shape.flops_per_token(causal=True))
    limitless = Gpu("", 100.0, 200.0, 1e12, 80.0)
    expected = products / one_gpu.product_share(shape.hidden_size) + attention / one_gpu.ATTENTION
    assert seconds_per_token(training, limitless) == pytest.approx(expected / 100e12)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_names_are_the_number_of_parameters(training):
    billions = float(training.name.split("-")[-1][:-1])
    assert training.parameters / 1e9 == pytest.approx(billions, rel=0.1)


def test_what_makes_it_faster_and_what_fits():
    small, large = TRAININGS[0], TRAININGS[2]
    a100, h100, h200, b200 = GPUS
    times = [seconds_per_token(small, gpu) for gpu in (a100, h100, h200, b200)]
    assert times == sorted(times, reverse=True)
    assert seconds_per_token(small, h100, fp8=True) < times[1]
    assert one_gpu.fitting(small, h100) == "16"
    assert (one_gpu.fitting(large, h100), one_gpu.fitting(large, h200)) == ("8", "16")
    huge = Training("", large.shape, 65_536, 65_536)
    assert one_gpu.fitting(huge, h100) == "-"
