"""BERT, T5 and Retro on a device that is not the CPU (tests/unit/one_device.py), as
test_on_fake_gpu.py has it for GPT."""

import contextlib
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from one_device import GPU, OneDevice

from megatron.families import build_model, family_names, spec_of
from megatron.run.run import parse_run, run_data

COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 127 --mock-data --seq-length 32 --hidden-dropout 0 --attention-dropout 0"
).split()
KINDS = {
    "bert": [],
    "bert post-norm": ["--apply-residual-connection-post-layernorm", "--hidden-dropout", "0.1"],
    "bert without a second head": ["--bert-no-binary-head", "--swiglu", "--num-query-groups", "2"],
    "retro": ["--retro-gpt-chunk-length", "8"],
    "t5": ["--decoder-seq-length", "16"],
    "t5 relative": [
        *("--decoder-seq-length", "16", "--position-embedding-type", "relative"),
        *("--normalization", "RMSNorm", "--disable-bias-linear", "--query-pre-attn-scalar", "1"),
    ],
}
KINDS = {kind: words for kind, words in KINDS.items() if kind.split()[0] in family_names()}
PADDED = [kind for kind in KINDS if kind not in ("t5 relative", "retro")]
RECOMPUTED = {
    "none": [],
    "full": ["--recompute-granularity", "full"],
    "selective": ["--recompute-granularity", "selective"],
}


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch):
    """It knows no "meta"."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


@cache
def parts(kind: str, recompute: str):
    run = parse_run(
        None, ["--model-family", kind.split()[0], *COMMON, *KINDS[kind], *RECOMPUTED[recompute]]
    )
    data, config = run_data(run), run.config
    batch = data.collate([data.datasets.train[n] for n in range(2)])
    return config, batch


def build(kind: str, recompute: str = "none"):
    """One step, as a function."""
    config, batch = parts(kind, recompute)
    with GPU:
        model = build_model(config.model, config.parallel).to(torch.bfloat16)
    spec, there = spec_of(config.model), batch.to(GPU)

    def step() -> torch.nn.Module:
        model.zero_grad()
        begin = spec.begin(there).changed(dropout_seed=7)
        spec.total(model(begin).losses).backward()
        return model

    return step


def cases():
    """In the sample each kind has one form of recomputation, in turn."""
    for (number, kind), (turn, form) in product(enumerate(KINDS), enumerate(RECOMPUTED)):
        marks = () if number % len(RECOMPUTED) == turn else pytest.mark.proof
        yield pytest.param(kind, form, marks=marks)


@pytest.mark.parametrize(("kind", "recompute"), list(cases()))
def test_a_step_stays_on_its_device(monkeypatch, kind, recompute):
    """In the second step, after what is made once, the host only queues work."""
    step = build(kind, recompute)
    step()

    def send(*_, **__):
        raise AssertionError("the host sends numbers to the device, which waits for nothing else")

    monkeypatch.setattr(torch, "tensor", send)
    with OneDevice():
        model = step()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert (param.grad.device, param.grad.dtype) == (GPU, param.dtype), name


@pytest.mark.parametrize("kind", PADDED)
def test_padding_is_a_mask_of_keys_alone(monkeypatch, kind):
    """No kernel gets a mask of queries x keys: padding is a row for each sample."""
    shapes, real = [], F.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, **options):
        shapes.append(None if attn_mask is None else tuple(attn_mask.shape))
        return real(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    build(kind)()
    padding, causal = (2, 1, 1, 32), None
    blocks = {"bert": [padding], "t5": [padding] * 2 + [causal, padding] * 2}[kind.split()[0]]
    assert shapes == (blocks * 2 if kind.startswith("bert") else blocks)


@pytest.mark.features
def test_only_predicted_tokens_have_logits(monkeypatch):
    rows, real = set(), torch.addmm

    def spy(bias, left, right, **options):
        if "out" in options:
            rows.add(len(left))
        return real(bias, left, right, **options)

    monkeypatch.setattr(torch, "addmm", spy)
    _, batch = parts("bert", "none")
    build("bert")()
    assert rows == {2 * batch.positions_BP.shape[1]} and batch.positions_BP.shape[1] == 8
