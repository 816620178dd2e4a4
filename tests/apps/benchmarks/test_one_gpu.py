"""The estimate of one GPU, and its table in the documentation."""

import dataclasses
from pathlib import Path

import one_gpu
import pytest
from one_gpu import GPUS, MODELS, STATES, Fit, fitting, seconds_per_token

from megatron.apps.planning.memory import peak_memory, state_bytes
from megatron.apps.planning.parameters import linear_parameters, model_parameters
from megatron.apps.planning.step_time import Hardware
from megatron.config.layouts import Layout
from megatron.model.flops import TransformerShape

ROOT = Path(__file__).parents[3]


def test_the_page_has_the_table():
    """``python benchmarks/one_gpu.py`` prints it."""
    assert one_gpu.markdown() in (ROOT / "docs/guides/gpu.md").read_text()


def test_states_are_those_of_their_page():
    """Bytes of a parameter, and bytes that an update moves."""
    lines = (ROOT / "docs/guides/gpu.md").read_text().splitlines()
    tables = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines}
    for states in STATES:
        row = tables["float32" if states.dtypes is None else states.name]
        together, moved = map(float, row[-2:])
        stored = Layout(zero=1, precision="bf16", states=states.dtypes)
        assert together == pytest.approx(state_bytes(stored).total, abs=0.005)
        assert moved == states.moved


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_linear_layers_and_attention_are_all_model_flops(shape, monkeypatch):
    """With nothing but FLOPs, at rates that products and attention reach, the time is theirs."""
    model = shape.model()
    flops = TransformerShape.of(model)
    products = 6 * model.num_layers * linear_parameters(model, 1)
    products += 6 * flops.padded_vocab_size * flops.hidden_size
    attention = 6 * flops.num_layers * flops.num_attention_heads * flops.kv_channels
    attention *= flops.seq_length  # causal: half of all pairs
    assert products + attention == pytest.approx(flops.flops_per_token(causal=True))
    limitless = dataclasses.replace(GPUS[0], bandwidth=1e12)
    expected = products / one_gpu.product_share(flops.hidden_size) + attention / one_gpu.ATTENTION
    found = seconds_per_token(shape, limitless, Fit(STATES[0], shape.micro_tokens))
    assert found == pytest.approx(expected / 312e12)


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_names_are_the_number_of_parameters(shape):
    billions = float(shape.name.split("-")[-1][:-1])
    assert model_parameters(shape.model()) / 1e9 == pytest.approx(billions, rel=0.1)
    assert shape.model().vocabulary.padded == shape.vocabulary


def test_what_makes_it_faster():
    small = MODELS[0]
    whole, stored = (Fit(states, small.micro_tokens) for states in STATES[:2])
    times = [seconds_per_token(small, gpu, whole) for gpu in GPUS]
    assert times == sorted(times, reverse=True)
    h100 = GPUS[1]
    assert seconds_per_token(small, h100, whole, fp8=True) < times[1]
    saved = 10 * model_parameters(small.model()) / small.step_tokens
    expected = times[1] - saved / (one_gpu.BANDWIDTH * 1e12 * h100.bandwidth)
    assert seconds_per_token(small, h100, stored) == pytest.approx(expected)


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("fp8", [False, True])
def test_what_fits_is_what_the_planner_says(shape, fp8):
    """It fits; and with twice the micro batch, if that is not more than the shape's, not."""
    model, found = shape.model(), [fitting(shape, gpu, fp8) for gpu in GPUS]
    for gpu, fit in zip(GPUS, found, strict=True):
        if fit is None:
            continue
        usable = Hardware(gpu_memory=f"{gpu.memory}GiB").usable_memory
        layout = Layout(zero=1, precision="bf16", states=fit.states.dtypes, float8=fp8)
        samples = fit.micro_tokens // shape.seq_length
        assert peak_memory(model, layout, samples, 8).total <= usable
        if fit.micro_tokens < shape.micro_tokens:
            assert peak_memory(model, layout, 2 * samples, 8).total > usable
    assert found[3] is not None


def test_7b_in_80_gb():
    """Qwen2.5-7B needs smaller micro batches than its own, and no larger ones with fp8 weights."""
    h100, qwen = GPUS[1], MODELS[-1]
    plain, eight = fitting(qwen, h100), fitting(qwen, h100, fp8=True)
    assert plain is not None and plain.micro_tokens < qwen.micro_tokens
    assert eight is None or eight.micro_tokens <= plain.micro_tokens
    narrow = dataclasses.replace(h100, memory=40.0)
    assert fitting(qwen, narrow) is None
