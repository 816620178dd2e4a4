"""Gates of DeepSpeed and Phi-MoE against theirs, on the same logits and random numbers; orders of
choices and quantile balancing against loops."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from deepspeed.moe import sharded_moe
from routers import chosen_map, in_float64, random_logits, routed, router, weight_map
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from megatron.features.experts.balance import losses
from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.gates import _Draws, blended_bias, places, quantile_bias

TOKENS, EXPERTS = 80, 8
CAPACITIES = [
    # factor, smallest capacity
    pytest.param(1.0, 4, id="1.0"),
    pytest.param(1.1, 0, id="rounded in float32"),
    pytest.param(0.5, 0, id="0.5"),
    pytest.param(0.2, 5, id="smallest"),
    pytest.param(20.0, 4, id="above all tokens"),
    pytest.param(None, 4, id="no drops"),
]


def compared(gate, logits_TE, config, seed=None, training=True):
    """Compare a gate of DeepSpeed's with ours: choices, weights, loss, and gradients."""
    with in_float64(sharded_moe) if logits_TE.dtype == torch.float64 else nullcontext():
        their_loss, combine_TEC, dispatch_TEC, _ = gate(logits_TE * 1.0)
    routing = routed(logits_TE, config, training, seed=seed)
    their_weights_TE = combine_TEC.sum(-1)
    assert torch.equal(chosen_map(routing.experts_TK, EXPERTS), dispatch_TEC.sum(-1))
    weights_TE = weight_map(routing.experts_TK, routing.weights_TK, EXPERTS)
    exact = dict(rtol=1e-12, atol=1e-12) if logits_TE.dtype == torch.float64 else {}
    torch.testing.assert_close(weights_TE, their_weights_TE, **exact)
    loss = losses(routing, logits_TE, config, EXPERTS, SharedTokens(1, TOKENS))
    torch.testing.assert_close(loss["load_balancing_loss"], their_loss, **exact)
    factor_TE = random_logits(TOKENS, EXPERTS, seed=9, dtype=weights_TE.dtype)
    grads = [
        torch.autograd.grad((each * factor_TE).sum() + aux, logits_TE)[0]
        for each, aux in (
            (weights_TE, loss["load_balancing_loss"]),
            (their_weights_TE, their_loss),
        )
    ]
    torch.testing.assert_close(*grads, **(exact or dict(rtol=1e-5, atol=1e-7)))
    return int(chosen_map(routing.experts_TK, EXPERTS).sum())


def deepspeed(k, factor, smallest, **fields):
    return router(
        k,
        gate="deepspeed",
        expert_capacity_factor=factor or 1.0,
        token_dropping=factor is not None,
        min_capacity=smallest,
        **fields,
    )


@pytest.fixture
def their_uniform(monkeypatch):
    """Sets the random numbers of DeepSpeed's top-1 gate, by token."""

    def set_numbers(uniform_N1):
        numbers = {torch.device("cpu"): lambda shape: uniform_N1.expand(*shape)}
        monkeypatch.setattr(sharded_moe, "exp_selection_uniform_map", numbers)

    return set_numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("factor", "smallest"), CAPACITIES)
@pytest.mark.parametrize("seed", [None, 3])
def test_top1_gate_of_deepspeed(factor, smallest, seed, dtype, their_uniform):
    logits_TE = random_logits(TOKENS, EXPERTS, dtype=dtype).requires_grad_()
    if seed is None:
        # Without random numbers an expert keeps its first tokens.
        their_uniform(torch.linspace(1.0, 0.1, TOKENS)[:, None])
    else:
        their_uniform(_Draws(seed, SharedTokens(1, TOKENS), logits_TE).uniform_N1())
    theirs = partial(
        sharded_moe.top1gating,
        capacity_factor=factor or 1.0,
        min_capacity=smallest,
        drop_tokens=factor is not None,
    )
    kept = compared(theirs, logits_TE, deepspeed(1, factor, smallest), seed)
    assert (kept < TOKENS) == (factor is not None and factor < 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("factor", "smallest"), CAPACITIES)
@pytest.mark.parametrize("sampling", [False, True])
def test_top2_gate_of_deepspeed(factor, smallest, sampling, dtype, monkeypatch):
    logits_TE = random_logits(TOKENS, EXPERTS, dtype=dtype).requires_grad_()
    noise_TE = _Draws(3, SharedTokens(1, TOKENS), logits_TE).gumbel_TE(EXPERTS)
    monkeypatch.setattr(sharded_moe, "gumbel_rsample", lambda shape, device: noise_TE)
    theirs = partial(
        sharded_moe.top2gating,
        capacity_factor=factor or 1.0,
        min_capacity=smallest,
        drop_tokens=factor is not None,
        top2_2nd_expert_sampling=sampling,
    )
    config = deepspeed(2, factor, smallest, top2_2nd_expert_sampling=sampling)
    compared(theirs, logits_TE, config, seed=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("factor", "smallest"), CAPACITIES)
@pytest.mark.parametrize("k", [3, 5])
def test_topk_gate_of_deepspeed(factor, smallest, k, dtype):
    logits_TE = random_logits(TOKENS, EXPERTS, dtype=dtype).requires_grad_()
    theirs = partial(
        sharded_moe.topkgating,
        k=k,
        capacity_factor=factor or 1.0,
        min_capacity=smallest,
        drop_tokens=factor is not None,
    )
    compared(theirs, logits_TE, deepspeed(k, factor, smallest))


def test_evaluation_has_a_capacity_of_its_own(their_uniform):
    logits_TE = random_logits(TOKENS, EXPERTS).requires_grad_()
    their_uniform(torch.linspace(1.0, 0.1, TOKENS)[:, None])
    config = deepspeed(1, 0.25, 0, eval_capacity_factor=0.75)
    theirs = partial(sharded_moe.top1gating, capacity_factor=0.75, min_capacity=0)
    compared(theirs, logits_TE, config, training=False)


def test_first_choices_come_before_second_ones():
    # Token 0 has expert 0 as its second choice, tokens 1 and 2 as their first.
    logits_TE = torch.tensor([[1.0, 2, 0, 0], [2.0, 0, 1, 0], [2.0, 0, 0, 1]])
    routing = routed(logits_TE, router(2, gate="deepspeed", expert_capacity_factor=4 / 3))
    assert routing.experts_TK.tolist() == [[1, 4], [0, 2], [0, 3]]
    assert routing.weights_TK[0].tolist() == [1.0, 0.0]


def test_random_tokens_depend_on_the_seed_alone():
    logits_TE = random_logits(TOKENS, EXPERTS)
    config = deepspeed(1, 0.5, 0)
    kept = [routed(logits_TE, config, seed=seed).experts_TK for seed in (1, 1, 2)]
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


def test_places_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    experts_M = torch.randint(0, 5, (60,), generator=generator)
    priority_M = torch.randint(0, 4, (60,), generator=generator).double()
    for priority in (None, priority_M):
        expected = [0] * 60
        for expert in range(5):
            chosen = [n for n in range(60) if experts_M[n] == expert]
            chosen.sort(key=lambda n: 0 if priority is None else -float(priority[n]))
            for place, n in enumerate(chosen):
                expected[n] = place
        assert places(experts_M, 6, priority).tolist() == expected
    assert places(experts_M[:0], 6, priority_M[:0]).tolist() == []


class TheirDraws:
    """The random numbers that transformers' function draws from the default generator."""

    def __init__(self, seed, tokens, like) -> None:
        torch.manual_seed(seed)
        self.uniform = []
        self.like = like

    def gumbel_TE(self, experts):
        return -torch.empty_like(self.like).exponential_().log()

    def uniform_N1(self):
        numbers = torch.rand(len(self.like), 1, dtype=self.like.dtype)
        self.uniform.append(numbers)
        # For the second choice they draw twice, and use the second.
        return numbers if len(self.uniform) == 1 else torch.empty_like(numbers).uniform_()


@pytest.mark.parametrize("training", [False, True])
def test_sparse_mixer_of_transformers(training, monkeypatch):
    monkeypatch.setattr("megatron.features.experts.gates._Draws", TheirDraws)
    logits_TE = random_logits(400, EXPERTS, dtype=torch.float32).mul(0.02).add(1).requires_grad_()
    torch.manual_seed(6)
    theirs_TK, their_experts_TK = sparsemixer(logits_TE, jitter_eps=0.01, training=training)
    routing = routed(logits_TE, router(gate="sparsemixer"), training, seed=6 if training else None)
    assert torch.equal(routing.experts_TK, their_experts_TK)
    torch.testing.assert_close(routing.weights_TK, theirs_TK)
    sampled = (routing.experts_TK[:, 0] != logits_TE.argmax(1)).float().mean()
    assert sampled > 0.2 if training else sampled == 0
    factor_TK = torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    grads = [
        torch.autograd.grad((each * factor_TK).sum(), logits_TE)
        for each in (routing.weights_TK, theirs_TK)
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_gumbel_noise_samples_by_the_softmax():
    logits_TE = torch.tensor([0.5, -0.2, 0.1, -1.0]).expand(20000, 4)
    noise_TE = _Draws(0, SharedTokens(1, 20000), logits_TE).gumbel_TE(4)
    shares_E = (logits_TE + noise_TE).argmax(1).bincount() / 20000
    torch.testing.assert_close(shares_E, logits_TE[0].softmax(-1), rtol=0, atol=0.012)


def test_quantile_bias_against_a_loop():
    logits_TE = random_logits(24, 6, dtype=torch.float32)
    bias_E = torch.linspace(-0.3, 0.3, 6)
    ours_E = quantile_bias(logits_TE, bias_E, 2, SharedTokens(1, 24))
    thresholds = [sorted((row + bias_E).tolist())[-3] for row in logits_TE]
    for expert in range(6):
        margins = [float(row[expert]) - t for row, t in zip(logits_TE, thresholds, strict=True)]
        assert -ours_E[expert].item() == pytest.approx(
            sorted(margins)[-(24 * 2 // 6 + 1)], abs=1e-6
        )
    blended_E = blended_bias(bias_E, ours_E, 0.9)
    expected_E = 0.9 * bias_E + 0.1 * ours_E
    torch.testing.assert_close(blended_E, expected_E - expected_E.mean())


def test_quantile_balancing_evens_out_choices():
    config = router(2, load_balancing_type=("quantile_balancing",), score_function="sigmoid")
    bias_E, largest = torch.zeros(8), []
    for step in range(20):
        logits_TE = random_logits(256, 8, seed=step, dtype=torch.float32)
        routing = routed(logits_TE, config, expert_bias_E=bias_E)
        largest.append(chosen_map(routing.experts_TK, 8).sum(0).max().item())
        # Weights are of the scores without the bias.
        scores_TK = logits_TE.sigmoid().gather(1, routing.experts_TK)
        torch.testing.assert_close(routing.weights_TK, scores_TK / scores_TK.sum(1, keepdim=True))
        bias_E = blended_bias(
            bias_E, quantile_bias(logits_TE, bias_E, 2, SharedTokens(1, 256)), 0.5
        )
    assert largest[0] > 110
    assert max(largest[10:]) < 85
