"""z-loss of the fused head against torch's logsumexp and autograd in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron.config import ConfigError
from megatron.families import trained_spec
from megatron.features.z_loss.objective import Z_LOSS, linear_loss_and_z
from megatron.parallel import cross_entropy, softmax_loss
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

VOCAB, PADDED, WIDTH, COEFF = 37, 48, 12, 0.3
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 99 --z-loss-coeff 1e-3"
).split()


def case(dtype=torch.float64):
    draw = torch.Generator().manual_seed(5)
    randn = partial(torch.randn, generator=draw, dtype=torch.float64)
    x, weight, bias = randn(2, 7, WIDTH), randn(PADDED, WIDTH), randn(PADDED)
    labels = torch.randint(VOCAB, (2, 7), generator=draw)
    mask = (torch.rand(2, 7, generator=draw) < 0.7).float()
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)], Targets(labels, mask)


def definition(parameters, targets, softcap):
    """(cross entropy, mean log(Z)^2), from all logits."""
    x, weight, bias = parameters
    logits = F.linear(x, weight[:VOCAB], bias[:VOCAB])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    mask = targets.mask_BS.double() / targets.mask_BS.sum()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.labels_BS.flatten(), reduction="none")
    return loss @ mask.flatten(), (logits.logsumexp(-1) ** 2 * mask).sum()


@pytest.mark.parametrize("way", ["eager", "definition"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_bytes", [0, 3 * 8 * PADDED])
def test_against_the_formula(way, softcap, chunk_bytes, monkeypatch):
    """Values and gradients, 1e-12. "definition": what GPUs compile."""
    if way == "definition":
        monkeypatch.setattr(cross_entropy, "compiles_for", lambda kind: True)
        monkeypatch.setattr(softmax_loss, "compiled", lambda function: function)
    parameters, targets = case()
    head = LossHead(VOCAB, softcap, chunk_bytes, TensorParallel(), COEFF)
    loss, z = linear_loss_and_z(*parameters[:2], targets, head, parameters[2])
    (2.0 * (loss + COEFF * z)).backward()
    copies, _ = case()
    expected, expected_z = definition(copies, targets, softcap)
    (2.0 * (expected + COEFF * expected_z)).backward()
    torch.testing.assert_close((loss, z), (expected, expected_z), rtol=1e-12, atol=0)
    for ours, theirs in zip(parameters, copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_the_minimised_loss_has_the_coefficient_and_evaluations_do_not():
    spec = trained_spec(parse_run(None, FLAGS).config)
    assert spec.losses == {"lm loss": 1.0, Z_LOSS: 1e-3}
    assert spec.total({"lm loss": 2.0, Z_LOSS: 100.0}) == pytest.approx(2.1)
    assert spec.total({"lm loss": 2.0, Z_LOSS: 100.0}, but=spec.training_only) == 2.0


@pytest.mark.parametrize("flags, message", [
    ("--z-loss-coeff -1", "--z-loss-coeff -1.0 must"),
    ("--kd --load-teacher x", "--z-loss-coeff 0.001 contradicts --kd"),
])  # fmt: skip
def test_contradictions_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse_run(None, [*FLAGS, *flags.split()])


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_other_families_are_refused(family):
    with pytest.raises(ConfigError, match="--z-loss-coeff"):
        parse_run(None, [*FLAGS, "--max-position-embeddings", "64"], family)
