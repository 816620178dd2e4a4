"""Reward models: the loss of pairs, and the head that is trained next to adapters."""

import math

import pytest
import torch
from configs import model_config

from megatron.config import ParallelConfig, RunConfig
from megatron.data.gpt_batch import GPTBatch
from megatron.families import build_model, spec_of
from megatron.features.adapters.flags import AdapterConfig, is_adapter
from megatron.features.adapters.model import with_adapters
from megatron.features.preference.reward_head import reward_losses
from megatron.model.layer_list import LayerStack
from megatron.parallel.tensor_parallel import TensorParallel

LLAMA = {
    "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def reward_model():
    return model_config(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, head="reward",
        position_embedding_type="rope", hidden_dropout=0.0, attention_dropout=0.0, **LLAMA,
    ).with_vocabulary(31)  # fmt: skip


def test_losses_of_pairs():
    rewards = torch.tensor([1.0, 0.0, -2.0, 1.0], dtype=torch.float64)
    found = reward_losses(rewards)
    sigmoids = [1 / (1 + math.exp(-each)) for each in (1.0, -3.0)]
    expected = -sum(map(math.log, sigmoids)) / 2
    assert float(found["reward loss"]) == pytest.approx(expected)
    assert [float(value) for value in list(found.values())[1:]] == [-0.5, 0.5, -1.0, 0.5]
    margins = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    sigmoids = [1 / (1 + math.exp(-each)) for each in (0.5, -3.0)]
    expected = -sum(map(math.log, sigmoids)) / 2
    assert float(reward_losses(rewards, margins)["reward loss"]) == pytest.approx(expected)


def test_padding_after_a_text_changes_nothing():
    model = reward_model()
    network, spec = build_model(model), spec_of(model)
    rows = [torch.tensor(row).numpy() for row in ([3, 4, 5], [6, 7])]
    with torch.no_grad():
        for param in network.parameters():
            param.normal_(0, 0.3)
        found = [
            spec.total(network(spec.begin(GPTBatch.ended(rows, length))).losses)
            for length in (3, 8)
        ]
    torch.testing.assert_close(*found)


def test_the_head_is_trained_next_to_adapters():
    flags = AdapterConfig(lora=True, lora_rank=2)
    config = RunConfig(model=reward_model(), sections=(flags,))
    spec = with_adapters(spec_of(config.model), config)
    stack = LayerStack(spec.layers(TensorParallel()), ParallelConfig())
    trained = [name for name, param in stack.canonical_parameters() if param.requires_grad]
    assert "score.weight" in trained
    assert all(is_adapter(name) for name in trained if name != "score.weight")
