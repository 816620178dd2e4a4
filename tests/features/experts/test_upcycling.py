"""Upcycled models against the dense ones, and their weights against Megatron-LM's formulas
(``core/transformer/moe/upcycling_utils.py``), written down here."""

import dataclasses

import pytest
import torch
from configs import run_config

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ConfigError
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.upcycling import UpcycledSource, upcycle_command, upcycled_model
from megatron.formats.inspection import model_of

EXPERTS, INNER = 8, 48


@pytest.fixture(scope="module")
def dense_of(tmp_path_factory, gpt_config, random_gpt, write_checkpoint):
    """Writes and opens a dense checkpoint of random weights."""

    def make(**fields):
        config = gpt_config(**fields)
        folder = tmp_path_factory.mktemp("dense")
        return CheckpointReader(write_checkpoint(folder, config, random_gpt(config)))

    return make


def upcycled(dense, granularity=1, seed=3, **fields):
    experts = ExpertsConfig(num_experts=(EXPERTS,), **fields)
    model = upcycled_model(dense.model, experts, granularity)
    return UpcycledSource(dense, model, granularity, seed)


def logits(source, router=None):
    model = model_of(source, torch.float64, torch.device("cpu"))
    if router is not None:
        for name, param in model.canonical_parameters():
            if ".router." in name:
                param.fill_(router)
    tokens = torch.arange(40).reshape(2, 20) % 61
    from gpt_forward import forward

    return forward(model, tokens)


PROOF = pytest.mark.proof
LLAMA = {"llama": True}
SQUARED = {"llama": True, "swiglu": False, "squared_relu": True}


@pytest.mark.parametrize(
    ("dense", "granularity", "fields", "router"),
    [
        pytest.param(LLAMA, 1, {"moe_router_topk": 2}, None, id="copies"),
        pytest.param({}, 1, {"moe_router_topk": 3}, None, id="copies-with-biases", marks=PROOF),
        pytest.param(SQUARED, 2, {"moe_router_topk": 2}, None, id="parts"),
        pytest.param(SQUARED, 4, {"moe_router_topk": 8}, None, id="all-copies", marks=PROOF),
        pytest.param(
            SQUARED, 2, {"moe_router_topk": 4, "moe_router_pre_softmax": True}, 0.0,
            id="before-the-choice",
        ),
        pytest.param(
            LLAMA, 1, {"moe_router_topk": 8, "moe_router_pre_softmax": True}, None,
            id="all-experts", marks=PROOF,
        ),
        pytest.param(LLAMA, 1, {"moe_layer_freq": "[0,1]"}, None, id="a-layer"),
    ],
)  # fmt: skip
def test_output_equals_the_dense_model(dense_of, dense, granularity, fields, router):
    """Exactly, by the weights' sum of 1 and a homogeneous activation; with the router's initial
    weights, or, where a softmax over all experts needs it, with none."""
    source = dense_of(**dense)
    read, expected = logits(upcycled(source, granularity, **fields), router), logits(source)
    bound = 1e-12 if granularity == 1 else 1e-6  # scaled weights are rounded to float32
    assert (read - expected).abs().max() < bound * expected.abs().max()


def theirs(dense, granularity, topk, pre_softmax, gated):
    """Weights of every expert by the published code's formulas."""
    copies = EXPERTS // granularity
    scale = copies * granularity * granularity / topk if pre_softmax else granularity
    scale = scale ** (1 / 3) if gated else scale ** (1 / 2)
    up, down = dense["up"] * scale, dense["down"] * scale
    if gated:
        first, second = torch.chunk(up, 2, dim=0)
        first = torch.tensor_split(first, granularity, dim=0)
        second = torch.tensor_split(second, granularity, dim=0)
        ups = [torch.cat([first[i], second[i]], dim=0) for i in range(granularity)]
    else:
        ups = list(torch.tensor_split(up, granularity, dim=0))
    downs = list(torch.tensor_split(down, granularity, dim=1))
    return torch.stack(ups * copies), torch.stack(downs * copies)


@pytest.mark.parametrize(
    "granularity", [2, *(pytest.param(n, marks=pytest.mark.proof) for n in (1, 4))]
)
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("llama", [False, True])
def test_weights_are_megatrons(dense_of, granularity, pre_softmax, llama):
    dense = dense_of(llama=llama)
    source = upcycled(dense, granularity, moe_router_topk=4, moe_router_pre_softmax=pre_softmax)
    for layer in range(2):
        mlp = f"layers.{layer}.mlp"
        weights = {part: dense.tensor(f"{mlp}.{part}.weight") for part in ("up", "down")}
        up, down = theirs(weights, granularity, 4, pre_softmax, llama)
        assert torch.allclose(source.tensor(f"{mlp}.experts.up.weight"), up, rtol=1e-6)
        assert torch.allclose(source.tensor(f"{mlp}.experts.down.weight"), down, rtol=1e-6)
        rows = source.tensor(f"{mlp}.router.weight").view(-1, granularity, 32)
        assert torch.equal(rows, rows[:, :1].expand_as(rows))
        assert len(rows[:, 0].unique(dim=0)) == EXPERTS // granularity


def test_command_writes_a_checkpoint(dense_of, tmp_path, capsys):
    dense = dense_of(**LLAMA)
    upcycle_command(
        f"--load {dense.folder} --output {tmp_path / 'out'} --num-experts 8 "
        "--moe-upcycling-granularity 2 --moe-router-topk 4".split()
    )
    assert "train on it with --load" in capsys.readouterr().out
    source = open_checkpoint(tmp_path / "out")
    expected = upcycled(dense, 2, seed=1234, moe_router_topk=4)
    assert source.model == expected.model and source.names() == expected.names()
    for name in source.names():
        assert torch.equal(source.tensor(name), expected.tensor(name)), name
    with pytest.raises(CheckpointError, match="has experts already"):
        upcycled(source)


@pytest.mark.parametrize(
    ("granularity", "fields", "message"),
    [
        (3, {}, "--moe-upcycling-granularity 3 must divide --num-experts 8"),
        (2, {"moe_ffn_hidden_size": 16}, r"--moe-ffn-hidden-size 16: .* give 24"),
        (1, {"moe_latent_size": 8}, "--moe-latent-size contradicts upcycling"),
        (1, {"mlp_type": "residual"}, "--mlp-type residual contradicts upcycling"),
    ],
)
def test_what_is_refused(dense_of, granularity, fields, message):
    with pytest.raises(ConfigError, match=message):
        upcycled(dense_of(**LLAMA), granularity, **fields)


def test_another_dense_network_is_refused(dense_of):
    dense = dense_of(**LLAMA)
    model = upcycled(dense).model
    other = dataclasses.replace(model.flags(), num_query_groups=2).resolve()
    with pytest.raises(CheckpointError, match="num_query_groups is 4 in the checkpoint and 2"):
        UpcycledSource(dense, run_config(model=other).model, 1, 0)
