"""The layers of Gated DeltaNet and whole Qwen3-Next and Qwen3.5 models against transformers, in
float64; packed documents against each alone; compiled blocks without breaks of their graphs."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from gpt_forward import forward
from routers import in_float64

from megatron.families import build_model
from megatron.features.recurrent.conv import CausalConvolution
from megatron.features.recurrent.delta_layer import GatedDeltaNet
from megatron.features.recurrent.passing import Pieces
from megatron.formats.huggingface import linear_targets
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel.context import Context
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel

proof, LENGTH = pytest.mark.proof, 150
_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "pad_token_id": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
MODELS = {
    "qwen3_next": _SIZES | _EXPERTS,
    "qwen3_5_text": _SIZES,
    "qwen3_5_moe_text": {k: v for k, v in _SIZES.items() if k != "intermediate_size"} | _EXPERTS,
}
DELTA = {
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "[1,1]",
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "normalization": "RMSNorm",
}  # fmt: skip


def their_model(model_type):
    """A model of transformers in float64 with random weights."""
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            values = torch.randn(param.shape, generator=generator) * 0.15
            param.copy_(values + 1.0 if bool((param == 1).all()) else values)
    return model.eval()


@contextmanager
def computed_in_float64(model):
    """Their model computes in float64; its rotary frequencies, too, are of that precision."""
    model.double()
    rope = model.model.rotary_emb
    pairs = torch.arange(0, 2 * len(rope.inv_freq), 2, dtype=torch.float64)
    base = model.config.rope_parameters["rope_theta"]
    rope.inv_freq = base ** -(pairs / (2 * len(rope.inv_freq)))
    with in_float64(sys.modules[type(model).__module__]):
        yield


@pytest.mark.parametrize(
    "model_type", ["qwen3_next", *(pytest.param(m, marks=proof) for m in [*MODELS][1:])]
)
def test_gradients_against_transformers(model_type, tmp_path: Path):
    """Logits and every gradient, over several chunks."""
    theirs = their_model(model_type)
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    ours = build_model(source.model).eval()
    for name, param in ours.canonical_parameters():
        param.data.copy_(shard_of(param).cut(source.tensor(name)))
    ours.double()
    tokens = torch.randint(61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = forward(ours, tokens)[..., :61]
    with computed_in_float64(theirs):
        expected = theirs(input_ids=tokens).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        F.cross_entropy(expected.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    compared = 0
    ours_by_name = {name: param.grad for name, param in ours.canonical_parameters()}
    for parameter in source.architecture.parameters(source.model):
        if ".mlp.experts." in parameter.ours:  # in other tensors in memory
            continue
        rows = ours_by_name[parameter.ours]
        if parameter.ours.endswith(("word_embeddings.weight", "output_layer.weight")):
            rows = rows[:61]
        for name, gradient in parameter.to_hf(rows).items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-10)
            compared += 1
    assert compared > 20


def delta_layer(**flags):
    model = model_config(**DELTA | flags)
    layer = GatedDeltaNet(model, 0, TensorParallel(), recompute=flags.pop("recompute", False))
    generator = torch.Generator().manual_seed(0)
    for param in layer.double().parameters():
        param.data.normal_(std=0.5, generator=generator)
    return layer


def hidden(length, samples=2):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(samples, length, 8, dtype=torch.float64, generator=generator)


def test_packed_documents_are_as_if_alone():
    """Neither convolution nor state reads the document before."""
    layer, x = delta_layer(), hidden(150)
    ids = torch.tensor([[4] * 40 + [2] * 1 + [7] * 1 + [3] * 108, [1] * 40 + [9] * 110])
    packed = layer(x, LayerState(x, masks=AttentionMasks(ids)))
    for n, bounds in enumerate(((0, 40, 41, 42, 150), (0, 40, 150))):
        for start, end in zip(bounds, bounds[1:], strict=False):
            alone = x[n : n + 1, start:end]
            expected = layer(alone, LayerState(alone))
            torch.testing.assert_close(packed[n : n + 1, start:end], expected, rtol=0, atol=1e-12)


def test_recomputation_changes_nothing():
    results = []
    for recompute in (False, True):
        layer, x = delta_layer(), hidden(70).requires_grad_()
        layer.recompute = recompute
        layer(x, LayerState(x)).square().sum().backward()
        results.append([x.grad, *(param.grad for param in layer.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_against_torch(bias, documents):
    conv = CausalConvolution((1000, 500), 4, bias=bias, tp=TensorParallel()).double()
    for param in conv.parameters():
        param.data.normal_()
    ids = torch.tensor([[0] * 30 + [1] * 1 + [2] * 2 + [3] * 67]) if documents else None
    x = torch.randn(1, 100, 1500, dtype=torch.float64, requires_grad=True)
    actual = conv(x, Pieces(Context(), AttentionMasks(ids)))
    parts = x.split([30, 1, 2, 67] if documents else [100], 1)
    weight = conv.weight.unsqueeze(1)
    expected = torch.cat(
        [
            F.silu(F.conv1d(p.mT, weight, conv.bias, padding=3, groups=1500)[..., :-3]).mT
            for p in parts
        ],
        1,
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    inputs, grad = (x, *conv.parameters()), torch.randn_like(actual)
    for one, other in zip(
        torch.autograd.grad(actual, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.proof
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_without_breaks(recompute, documents):
    """One graph of a layer, with the same outputs and gradients."""
    layer, x = delta_layer(), hidden(70)
    layer.recompute = recompute
    ids = torch.tensor([[0] * 30 + [1] * 40, [0] * 70]) if documents else None
    run = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    results = []
    for function in (layer, run):
        layer.zero_grad()
        y = function(x, LayerState(x, masks=AttentionMasks(ids)))
        y.square().sum().backward()
        results.append([y.detach(), *(param.grad.clone() for param in layer.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_initial_decays_are_megatrons():
    layer = delta_layer()
    decays = layer.a_log.init.fill(torch.empty(4000), torch.Generator().manual_seed(0)).exp()
    assert 1 <= decays.min() < 1.1 and 15.9 < decays.max() <= 16
    assert abs(decays.mean() - 8.5) < 0.3


@proof
def test_the_text_model_in_one_that_sees_images(tmp_path: Path):
    """Logits of text, float32; a note says that nothing else is read."""
    transformers = pytest.importorskip("transformers", "5.0")
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
              "out_hidden_size": 32, "num_position_embeddings": 16}  # fmt: skip
    theirs = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=_SIZES, vision_config=images)
    ).eval()
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    ours, tokens = build_model(source.model).eval(), torch.arange(80)[None] % 61
    with torch.no_grad():
        for name, param in ours.canonical_parameters():
            param.copy_(shard_of(param).cut(source.tensor(name)))
        expected = theirs(input_ids=tokens).logits
        torch.testing.assert_close(forward(ours, tokens)[..., :61], expected, rtol=0, atol=1e-5)
    assert "the text model of qwen3_5 is read, and nothing else" in source.notes[0]


def test_rows_of_additions_are_those_of_the_weight(tmp_path: Path):
    """A low-rank addition to a module of theirs has the rows of its weight, in their order."""
    their_model("qwen3_next").save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    layer = "layers.{n}.attention.in_proj"
    targets = [each for each in linear_targets(source.model) if each.layer == layer]
    assert [each.module.rpartition(".")[2] for each in targets] == ["in_proj_qkvz", "in_proj_ba"]
    weight = source.tensor("layers.0.attention.in_proj.weight")
    whole = next(
        each for each in source.architecture.parameters(source.model) if "in_proj" in each.ours
    ).to_hf(weight)
    for target in targets:
        rows = weight[slice(*target.rows)]
        theirs = whole[f"{target.module.format(n=0)}.weight"]
        assert torch.equal(target.rows_to_hf(rows), theirs)
        assert torch.equal(target.rows_from_hf(theirs), rows)
