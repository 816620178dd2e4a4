"""Losses and numbers of a head that trl lacks, against definitions in plain torch."""

import itertools

import pytest
import torch
from reinforcement_flags import options_of

from megatron.apps.reinforcement.distill import Divergence, linear_divergence
from megatron.apps.reinforcement.head import token_numbers
from megatron.apps.reinforcement.losses import (
    KL,
    POLICY_LOSS,
    DrawnTokens,
    importance_ratio,
    policy_losses,
    value_loss,
)
from megatron.apps.reinforcement.objective import better_of
from megatron.features.distillation.divergence import TeacherHead
from megatron.parallel.loss_head import HeadInput, LossHead, Targets
from megatron.parallel.tensor_parallel import TensorParallel

B, P, H, USED, ROWS = 3, 5, 7, 11, 16


def drawn(*shape, seed=0, scale=1.0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=made) * scale


def tokens_of(seed=0, **more):
    """Tokens of a micro batch, the last text with one token less than the others."""
    mask = torch.ones(B, P, dtype=torch.float64)
    mask[-1, -1:] = 0
    numbers = [-drawn(B, P, seed=seed + n).abs() for n in range(3)]
    log_probs = numbers[0].requires_grad_()
    near = [log_probs.detach() + drawn(B, P, seed=seed + 9 + n, scale=0.3) for n in range(3)]
    values = dict(
        log_probs_BS=log_probs, entropies_BS=-numbers[1], mask_BS=mask,
        advantages_BS=drawn(B, P, seed=seed + 4), old_BS=near[0], sampled_BS=near[1],
        reference_BS=near[2], share=torch.ones((), dtype=torch.float64),
    )  # fmt: skip
    return DrawnTokens(**values | more)


def test_gspo_token():
    """Zheng et al. 2025, equation 13: s_t = sg[s] x p_t / sg[p_t]. The loss is that of sequences
    where the tokens of a text have one advantage, and so is its gradient."""
    given = {"rl": "gspo", "epsilon": 0.1, "epsilon_high": 0.2}
    tokens = tokens_of()
    tokens = tokens._replace(advantages_BS=tokens.advantages_BS[:, :1].expand(B, P))
    results = []
    for level in ("sequence", "sequence_token"):
        loss = policy_losses(options_of(**given, importance_sampling_level=level), tokens)
        grads = torch.autograd.grad(loss[POLICY_LOSS], tokens.log_probs_BS)
        results.append((loss[POLICY_LOSS], *grads))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-15)
    # And of each token's own ratio with the advantage of that token.
    tokens = tokens_of()
    options = options_of(**given, importance_sampling_level="sequence_token")
    found = policy_losses(options, tokens)[POLICY_LOSS]
    texts = []
    for row in range(B):
        counted = tokens.mask_BS[row] > 0
        own, old = tokens.log_probs_BS[row][counted], tokens.old_BS[row][counted]
        ratio = (own - old).mean().exp().detach()
        each = ratio * own.exp() / own.exp().detach()
        advantages = tokens.advantages_BS[row][counted]
        terms = torch.min(each * advantages, each.clamp(0.9, 1.2) * advantages)
        texts.append(-terms.mean())
    expected = torch.stack(texts).mean()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    grads = [torch.autograd.grad(each, tokens.log_probs_BS)[0] for each in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)
    assert grads[0].any()


def test_ratio_of_whole_texts():
    """RLOO: the ratio is the product over the tokens of a text."""
    tokens = tokens_of()
    ratio = importance_ratio(options_of(rl="rloo"), tokens)
    both = (tokens.log_probs_BS.exp() / tokens.old_BS.exp()).where(tokens.mask_BS > 0, 1.0)
    torch.testing.assert_close(ratio[:, 0], both.prod(1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_the_divergence(estimator):
    """Schulman 2020: k1 = log(p / q), k2 = its square / 2, k3 = (r - 1) - log r with r = q / p."""
    tokens = tokens_of()
    options = options_of(rl="reinforce++", kl_estimator=estimator)
    found = policy_losses(options, tokens)[KL]
    p, q = tokens.log_probs_BS.exp(), tokens.reference_BS.exp()
    expected = {"k1": (p / q).log(), "k2": (p / q).log() ** 2 / 2, "k3": q / p - 1 - (q / p).log()}
    mean = expected[estimator][tokens.mask_BS > 0].mean()
    torch.testing.assert_close(found, mean.detach(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("rl", ["dapo", "grpo", "dr_grpo", "ppo"])
def test_micro_batches_add_up_to_a_step(rl):
    """The mean over micro batches of their losses is the loss of the step: of every token the same
    share, or of every text, however the step is cut."""
    options = options_of(rl=rl, beta=0.0, max_completion_length=P)
    tokens = tokens_of()
    whole = policy_losses(options, tokens)[POLICY_LOSS]
    counts = tokens.mask_BS.sum(1)
    parts = []
    for row in range(B):
        share = counts[row] / counts.mean()
        own = DrawnTokens(*(part[row : row + 1] for part in tokens[:-1]), share)
        parts.append(policy_losses(options, own)[POLICY_LOSS])
    torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-12, atol=1e-15)


def test_nothing_counts():
    """A micro batch of which no token counts has a loss of 0 and a gradient of 0."""
    for rl in ("grpo", "dapo", "rloo", "gspo"):
        tokens = tokens_of(mask_BS=torch.zeros(B, P, dtype=torch.float64))
        loss = policy_losses(options_of(rl=rl), tokens)[POLICY_LOSS]
        assert loss == 0 and not torch.autograd.grad(loss, tokens.log_probs_BS)[0].any()


def test_value_loss():
    """Half of max((v - R)^2, (clip(v, old - c, old + c) - R)^2), as in baselines' ppo2, a mean over
    tokens."""
    options = options_of(rl="ppo", cliprange_value=0.3)
    values, returns, old = (drawn(B, P, seed=n) for n in range(3))
    mask = tokens_of().mask_BS
    values.requires_grad_()
    share = torch.tensor(0.7, dtype=torch.float64)
    found = value_loss(options, values, returns, old, mask, share)
    terms = []
    for row, place in itertools.product(range(B), range(P)):
        if mask[row, place]:
            value, target, before = (each[row, place] for each in (values, returns, old))
            near = torch.clamp(value, before - 0.3, before + 0.3)
            terms.append(torch.maximum((value - target) ** 2, (near - target) ** 2) / 2)
    expected = torch.stack(terms).mean() * 0.7
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    grads = [torch.autograd.grad(each, values)[0] for each in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [None, 1])
def test_numbers_of_a_head(softcap, chunk):
    """Log-probabilities and entropies at a temperature, and their gradients."""
    inputs = [drawn(*shape, seed=n).requires_grad_()
              for n, shape in enumerate(((B, P, H), (ROWS, H), (ROWS,)))]  # fmt: skip
    labels = torch.arange(B * P).view(B, P) % USED
    mask = tokens_of().mask_BS
    head = LossHead(USED, softcap, chunk, TensorParallel())
    x, weight, bias = inputs
    found = token_numbers(HeadInput(x, weight, bias, Targets(labels, mask), head), 0.7)
    logits = (x @ weight.t() + bias)[..., :USED]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = (logits / 0.7).log_softmax(-1)
    expected = (
        log_probs.gather(-1, labels[..., None])[..., 0] * mask,
        -(log_probs.exp() * log_probs).sum(-1) * mask,
    )
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-13)
    weights = drawn(B, P, seed=7), drawn(B, P, seed=8)
    grads = [
        torch.autograd.grad(sum((w * n).sum() for w, n in zip(weights, numbers, strict=True)),
                            inputs)
        for numbers in (found, expected)
    ]  # fmt: skip
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("chunk", [None, 1])
def test_divergence_from_a_teacher(beta, chunk):
    """Agarwal et al. 2024, equation 1, by its definition, where the teacher has fewer columns."""
    x, weight = drawn(B, P, H).requires_grad_(), drawn(ROWS, H, seed=1).requires_grad_()
    labels, mask = torch.zeros(B, P, dtype=torch.int64), tokens_of().mask_BS
    tp = TensorParallel()
    taught = TeacherHead(
        drawn(B, P, 4, seed=2), drawn(12, 4, seed=3), None, LossHead(9, 2.0, None, tp)
    )
    found = linear_divergence(
        x, weight, Targets(labels, mask), LossHead(USED, 3.0, chunk, tp), taught,
        Divergence(beta, 0.7),
    )  # fmt: skip
    p = (3 * torch.tanh((x @ weight.t())[..., :9] / 3) / 0.7).softmax(-1)
    q = (2 * torch.tanh((taught.x_BPH @ taught.weight_VH.t())[..., :9] / 2) / 0.7).softmax(-1)
    m = beta * q + (1 - beta) * p

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    each = kl(q, p) if beta == 0 else kl(p, q) if beta == 1 else beta * kl(q, m) + 0.6 * kl(p, m)
    expected = (each * mask).sum() / mask.sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    grads = [torch.autograd.grad(loss, (x, weight)) for loss in (found, expected)]
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-13)


def test_the_first_of_equal_texts_is_the_better_one():
    """As trl's OnlineDPOTrainer."""
    sums = torch.tensor([1.0, 2.0, 3.0, 3.0, 4.0, 1.0])
    assert better_of(tokens_of(advantages_BS=sums[:, None])).tolist() == [1, 0, 0]
