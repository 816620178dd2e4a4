"""Low-rank additions to the matrices of experts, in float64 against merged weights."""

import dataclasses

import pytest
import torch
from configs import model_config, run_config

from megatron.config import ConfigError
from megatron.families import spec_of
from megatron.features.adapters.checkpoint import merged
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.model import additions_of, with_adapters
from megatron.features.adapters.report import with_additions
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerStack, LayerState, initialise
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel

EXPERTS, HIDDEN, INNER, RANK = 5, 16, 12, 3
FIELDS = {
    "num_layers": 2, "num_experts": (EXPERTS,), "moe_layer_freq": "[0,1]", "hidden_size": HIDDEN,
    "num_attention_heads": 2, "seq_length": 10, "max_position_embeddings": 10, "swiglu": True,
    "moe_ffn_hidden_size": INNER, "moe_shared_expert_intermediate_size": 8,
    "padded_vocab_size": 64, "unpadded_vocab_size": 64,
}  # fmt: skip


def stack(lora, *targets, **flags):
    """A model in float64 of which no weight is zero, in training."""
    config = run_config(model=model_config(**FIELDS))
    spec = spec_of(config.model)
    if lora:
        adapters = AdapterConfig(lora=True, lora_rank=RANK, lora_targets=targets, **flags)
        config = dataclasses.replace(config, sections=(adapters,))
        spec = with_adapters(spec, config)
    model = LayerStack(spec.layers(TensorParallel()), config.parallel).double()
    for name, param in model.canonical_parameters():
        param.init = Init(std=0.4)
        initialise(name, param, 1)
    return model.train()


def trained(model):
    return {name: param for name, param in model.canonical_parameters() if param.requires_grad}


def test_outputs_and_gradients_are_those_of_merged_weights():
    """An expert's addition is B A of this expert; gradients by the chain rule of the merged
    weight's, G^T A and so on, in the test."""
    adapted = stack(True, "experts.up", "experts.down").blocks()[1].mlp
    plain = stack(False).blocks()[1].mlp
    scale = 2.0  # alpha 2 r over r
    for ours, theirs in ((adapted.experts.up, plain.experts.up),
                         (adapted.experts.down, plain.experts.down)):  # fmt: skip
        with torch.no_grad():
            for n in range(EXPERTS):
                theirs.weight[n] += scale * ours.lora_b[n] @ ours.lora_a[n]
            whole = merged(ours.weight, scale, ours.lora_a, ours.lora_b)
        torch.testing.assert_close(whole, theirs.weight, rtol=1e-13, atol=1e-13)
    x_BSH = torch.randn(2, 10, HIDDEN, dtype=torch.float64, requires_grad=True)
    results = []
    for mlp in (adapted, plain):
        y_BSH, _ = mlp(x_BSH, LayerState(x_BSH))
        y_BSH.square().sum().backward()
        results.append((y_BSH, x_BSH.grad))
        x_BSH.grad = None
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-11)
    for ours, theirs in ((adapted.experts.up, plain.experts.up),
                         (adapted.experts.down, plain.experts.down)):  # fmt: skip
        assert ours.weight.grad is None
        grad_EOI = theirs.weight.grad
        torch.testing.assert_close(
            ours.lora_b.grad, scale * grad_EOI @ ours.lora_a.mT, rtol=1e-11, atol=1e-11
        )
        torch.testing.assert_close(
            ours.lora_a.grad, scale * ours.lora_b.mT @ grad_EOI, rtol=1e-11, atol=1e-11
        )


def test_targets_choose_layers_and_the_router_stays_frozen():
    chosen = trained(stack(True, "experts.down"))
    assert {n: tuple(p.shape) for n, p in chosen.items()} == {
        "layers.1.mlp.experts.down.lora_a": (EXPERTS, RANK, INNER),
        "layers.1.mlp.experts.down.lora_b": (EXPERTS, HIDDEN, RANK),
    }
    layers = {name.rpartition(".")[0] for name in trained(stack(True, "all-linear"))}
    of_experts = {f"layers.1.mlp.{n}.{m}" for n in ("experts", "shared") for m in ("up", "down")}
    assert layers > of_experts and not any("router" in name for name in layers)
    assert trained(stack(True, "shared.up")).keys() == {
        "layers.1.mlp.shared.up.lora_a", "layers.1.mlp.shared.up.lora_b",
    }  # fmt: skip


def test_dora_of_experts_and_4_bits_are_refused():
    with pytest.raises(ConfigError, match=r"--use-dora is for linear layers.* \(experts.down\)"):
        stack(True, "all-linear", use_dora=True)
    with pytest.raises(ConfigError, match=r"--qlora stores .* most weights .* are its experts'"):
        stack(True, "qkv", qlora=True)
    layers = {name.rpartition(".")[0] for name in trained(stack(True, "shared.up", use_dora=True))}
    assert layers == {"layers.1.mlp.shared.up"}


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"--lora-targets router: .*it has .*up, down"):
        stack(True, "router")
    with pytest.raises(ConfigError, match="--lora-targets experts.up"):
        additions_of(model_config(), ["experts.up"])


def test_flops_of_additions_are_those_of_the_chosen_experts():
    """A token is multiplied by A and B of each of its K experts: 2 r (inputs + outputs) each."""
    config = run_config(model=model_config(**FIELDS))
    adapters = AdapterConfig(lora=True, lora_rank=RANK, lora_targets=("experts.up", "proj"))
    config = dataclasses.replace(config, sections=(adapters,))
    shape = with_additions(TransformerShape.of(config.model), config)
    experts = 2 * 2 * RANK * (HIDDEN + 2 * INNER)
    attended = 2 * config.model.attention.kv_channels  # of two heads, in each of two layers
    assert shape.additions == experts + 2 * 2 * RANK * (attended + HIDDEN)


def test_dropout_is_of_the_inputs_of_the_additions():
    mlp = stack(True, "experts.up", lora_dropout=0.5).blocks()[1].mlp
    x_BSH = torch.randn(2, 10, HIDDEN, dtype=torch.float64)
    first, second = (mlp(x_BSH, LayerState(x_BSH))[0] for _ in range(2))
    assert not torch.equal(first, second)
    mlp.eval()
    first, second = (mlp(x_BSH, LayerState(x_BSH))[0] for _ in range(2))
    assert torch.equal(first, second)
