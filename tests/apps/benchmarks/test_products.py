"""The products that a step is measured by: their shapes, what they compute, how they are timed."""

import dataclasses

import products
import pytest
import torch
import train
from configs import model_config
from contestants import matmuls, report
from contestants.command import setting_of
from products import PIECES, Attention, Linear, StepShape

from megatron.config import ModelConfig
from megatron.model.flops import TransformerShape


def model(**changes) -> ModelConfig:
    values = {
        "num_layers": 3,
        "hidden_size": 64,
        "ffn_hidden_size": 160,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "padded_vocab_size": 256,
    }
    return model_config(**(values | changes))


class Counted:
    """Stands in for torch's products: counts FLOPs, computes nothing."""

    def __init__(self, monkeypatch):
        self.mm, self.bmm = [], []
        monkeypatch.setattr(torch, "mm", self.multiply)
        monkeypatch.setattr(torch, "bmm", self.multiply_batches)

    def multiply(self, a, b, out):
        assert out.shape == (a.shape[0], b.shape[1])
        self.mm.append(2 * a.numel() * b.shape[1])

    def multiply_batches(self, a, b):
        self.bmm.append(2 * a.numel() * b.shape[2])
        return torch.empty(a.shape[0], a.shape[1], b.shape[2])


@pytest.mark.parametrize("gated", [False, True])
def test_flops_of_the_products_against_the_trainers(gated, monkeypatch):
    work = StepShape.of(model(swiglu=gated), 5).products(torch.float32, torch.device("cpu"))
    counted = Counted(monkeypatch)
    for product in work:
        product()
    shape = TransformerShape(3, 64, 160, 4, 2, 16, 32, 256, gated=gated)
    half = sum(counted.bmm) / (1 + 1 / PIECES)
    assert sum(counted.mm) + half == shape.flops_per_step(5, causal=True)


def test_products_of_frozen_weights_with_additions(monkeypatch):
    """Two of three products of a frozen weight, and all three of both matrices of an addition; of
    seven linear layers of a Llama's block, and of the head the former alone."""
    whole = StepShape.of(model(swiglu=True), 5)
    device = torch.device("cpu")
    totals = []
    for shape in (whole, dataclasses.replace(whole, lora_rank=8)):
        counted = Counted(monkeypatch)
        for product in shape.products(torch.float32, device):
            product()
        totals.append(sum(counted.mm))
    tokens, layers, rank = 5 * 32, 3, 8
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)]
    added = layers * sum(6 * tokens * rank * (i + o) for i, o in sizes)
    assert totals[1] == totals[0] * 2 / 3 + added


def test_products_of_answers_alone():
    shape = dataclasses.replace(StepShape.of(model(), 5), answer=7)
    (head,) = shape.head(torch.float32, torch.device("cpu"))
    assert head.x_TI.shape == (35, 64)


def test_products_are_timed_once_for_each_kind(monkeypatch):
    """Every kind takes a second here: five of every block, and the head."""
    timed = []
    monkeypatch.setattr(products, "cpu_seconds", lambda product: timed.append(product) or 1.0)
    assert StepShape.of(model(), 2).seconds(torch.bfloat16) == 3 * 5 + 1
    assert [type(product) for product in timed].count(Attention) == 1
    assert len(timed) == 6


def test_the_second_time_counts(monkeypatch):
    clock = iter([10.0, 13.0])
    monkeypatch.setattr(products.time, "process_time", lambda: next(clock))
    calls = []
    assert products.cpu_seconds(lambda: calls.append(1)) == 3.0
    assert len(calls) == 2


def test_a_linear_layer_has_its_three_products():
    linear = Linear(6, 4, 3, dtype=torch.float64)
    linear()
    x = linear.x_TI.clone().requires_grad_()
    weight = linear.weight_OI.clone().requires_grad_()
    y = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(linear.y_TO, y)
    y.backward(linear.y_TO)  # its own output stands in for the gradient
    torch.testing.assert_close(linear.grad_TI, x.grad)
    torch.testing.assert_close(linear.grad_OI, weight.grad)


@pytest.mark.parametrize(
    ("keys", "causal", "share"), [(64, True, (1 + 1 / PIECES) / 2), (64, False, 1), (96, False, 1)]
)
def test_half_of_causal_attention_is_multiplied(keys, causal, share, monkeypatch):
    attention = Attention(3, 64, keys, 8, causal)
    counted = Counted(monkeypatch)
    attention()
    assert sum(counted.bmm) == 6 * 2 * 3 * 64 * keys * 8 * share


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_flops_of_encoders_and_decoders_against_the_trainers(architecture, monkeypatch):
    options = train.parser().parse_args(
        f"--architecture {architecture} --layers 3 --hidden-size 64 --heads 4 --seq-length 64 "
        "--vocab-size 256 --micro-batch 5".split()
    )
    setting = setting_of(options, "")
    work = matmuls.shape_of(setting).products(torch.float32, torch.device("cpu"))
    counted = Counted(monkeypatch)
    for product in work:
        product()
    flops = report.shape_of(setting).flops_per_step(5, causal=False)
    if architecture == "t5":  # the decoder's own attention is made causally
        own = 3 * 6 * 2 * 5 * 64 * 16 * 16
        flops -= own * (1 - (1 + 1 / PIECES) / 2)
    assert sum(counted.mm) + sum(counted.bmm) == flops
