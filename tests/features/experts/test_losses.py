"""Losses that balance experts, and the bias that does it without one, against loops and
transformers."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from configs import model_config
from rank_threads import on_ranks
from routers import chosen_map, random_logits, routed, router
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron.families import build_model
from megatron.features.experts.balance import Balances, GlobalCounts, losses, updated_bias
from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.router import Routing, route
from megatron.model.layer_list import LayerState
from megatron.parallel.mesh import Mesh

EVERY = {
    "load_balancing_loss": 1.0,
    "seq_load_balancing_loss": 1.0,
    "global_load_balancing_loss": 1.0,
    "z_loss": 1.0,
}


def with_losses(config: SimpleNamespace, *names: str) -> SimpleNamespace:
    """The configuration with these losses, all without names."""
    weights = {name: 1.0 for name in names or EVERY}
    return SimpleNamespace(**vars(config) | {"loss_weights": weights})


def losses_of(logits_TE, config, samples=1, bias_E=None, counts=None):
    tokens, experts = SharedTokens(samples, len(logits_TE) // samples), logits_TE.shape[1]
    routing = route(logits_TE, config, experts, tokens, True, bias_E)
    with_others = counts and partial(counts.with_micro_batch, logits_TE)
    return losses(routing, logits_TE, config, experts, tokens, with_others)


def switch_loss(scores_TE, k, shares_E=None):
    """E x sum of f_i P_i, in loops; ``shares_E`` instead of the shares of these tokens."""
    tokens, experts = scores_TE.shape
    counts = [0.0] * experts
    for row in scores_TE.tolist():
        for expert in sorted(range(experts), key=lambda e: -row[e])[:k]:
            counts[expert] += 1
    total = 0.0
    for expert in range(experts):
        share = counts[expert] / (k * tokens) if shares_E is None else shares_E[expert]
        total = total + share * scores_TE[:, expert].mean()
    return experts * total


def probabilities(logits_TE, function):
    if function == "softmax":
        return logits_TE.softmax(-1)
    scores = {
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: (1 + x.exp()).log().sqrt(),
    }[function](logits_TE)
    return scores / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("k", [1, 3])
def test_losses_and_gradients_of_a_micro_batch_against_loops(function, k):
    config = with_losses(router(k, score_function=function, pre_softmax=True))
    logits_TE = random_logits(24, 8).requires_grad_()
    ours = losses_of(logits_TE, config, samples=3)
    scores_TE = probabilities(logits_TE, function)
    whole = switch_loss(scores_TE, k)
    of_samples = [switch_loss(sample_TE, k) for sample_TE in scores_TE.split(8)]
    expected = {
        "load_balancing_loss": whole,
        "seq_load_balancing_loss": sum(of_samples) / 3,
        "global_load_balancing_loss": whole,
        "z_loss": sum(row.exp().sum().log() ** 2 for row in logits_TE) / 24,
    }
    assert ours.keys() == expected.keys()
    for name, loss in ours.items():
        torch.testing.assert_close(loss, expected[name], rtol=1e-13, atol=0)
        grads = [
            torch.autograd.grad(x, logits_TE, retain_graph=True) for x in (loss, expected[name])
        ]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_transformers_loss_is_k_times_ours(k):
    logits_TE = random_logits(50, 8, dtype=torch.float32).requires_grad_()
    ours = losses_of(logits_TE, with_losses(router(k)))["load_balancing_loss"]
    theirs = load_balancing_loss_func((logits_TE,), 8, k)
    torch.testing.assert_close(k * ours, theirs)
    grads = [torch.autograd.grad(loss, logits_TE) for loss in (k * ours, theirs)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_balanced_choices_cost_one(function):
    # Each token prefers two neighbours of a ring.
    first_T = torch.arange(16) % 8
    logits_TE = 3.0 * torch.stack([torch.roll(torch.eye(8)[0], int(n)) for n in first_T]).double()
    logits_TE = logits_TE + torch.roll(logits_TE, 1, dims=1) / 2
    computed = losses_of(logits_TE, with_losses(router(2, score_function=function)), samples=2)
    for name in EVERY.keys() - {"z_loss"}:
        assert computed[name].item() == pytest.approx(1.0, abs=1e-13)


@pytest.mark.parametrize(
    "limits",
    [
        dict(enable_expert_bias=True),
        dict(num_groups=4, group_topk=1),
        dict(expert_capacity_factor=0.5),
        dict(eval_capacity_factor=0.5),
    ],
)
def test_losses_count_choices_without_bias_groups_and_capacity(limits):
    logits_TE = random_logits(32, 8)
    bias_E = torch.linspace(-2.0, 2.0, 8) if "enable_expert_bias" in limits else None
    fields = dict(score_function="sigmoid")
    config = with_losses(router(2, **fields, **limits))
    evaluated = "eval_capacity_factor" in limits
    limited = routed(logits_TE, config, training=not evaluated, expert_bias_E=bias_E)
    free = routed(logits_TE, router(2, **fields))
    assert not torch.equal(chosen_map(limited.experts_TK, 8), chosen_map(free.experts_TK, 8))
    computed = losses(limited, logits_TE, config, 8, SharedTokens(1, 32))
    expected = switch_loss(probabilities(logits_TE, "sigmoid"), 2)
    torch.testing.assert_close(computed["load_balancing_loss"], expected, rtol=1e-13, atol=0)


def test_losses_without_a_weight_are_not_computed():
    logits_TE = random_logits(8, 4)
    config = SimpleNamespace(**vars(router()) | {"loss_weights": dict.fromkeys(EVERY, 0.0)})
    assert losses_of(logits_TE, config) == {}
    assert losses_of(logits_TE, with_losses(router(), "z_loss")).keys() == {"z_loss"}


def test_z_loss_of_half_precision_is_computed_in_float32():
    logits_TE = random_logits(8, 4, dtype=torch.bfloat16)
    loss = losses_of(logits_TE, with_losses(router(), "z_loss"))["z_loss"]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(logits_TE.float().logsumexp(1).pow(2).mean().item())


@pytest.mark.parametrize("recomputed", [False, True])
def test_global_loss_has_the_choices_of_the_step_so_far(recomputed):
    config = with_losses(router(2, pre_softmax=True), "global_load_balancing_loss")
    counts = GlobalCounts()
    for step in range(2):
        batches = [random_logits(20, 8, seed=10 * step + n).requires_grad_() for n in range(3)]

        def loss_of(logits_TE):
            return losses_of(logits_TE, config, 2, counts=counts)["global_load_balancing_loss"]

        # As in a pipeline: forward passes of later micro batches come before backward passes.
        computed = [
            checkpoint(loss_of, batch, use_reentrant=False) if recomputed else loss_of(batch)
            for batch in batches
        ]
        total_E = torch.zeros(8)
        for logits_TE, loss in zip(batches, computed, strict=True):
            scores_TE = logits_TE.softmax(-1)
            total_E = total_E + chosen_map(scores_TE.topk(2).indices, 8).sum(0)
            shares_E = (total_E.double() / total_E.sum()).tolist()
            expected = switch_loss(scores_TE, 2, shares_E)
            torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
            (expected_grad,) = torch.autograd.grad(expected, logits_TE)
            loss.backward()
            torch.testing.assert_close(logits_TE.grad, expected_grad, rtol=1e-11, atol=1e-15)
        # An evaluation in between counts its own choices and leaves the step's.
        with torch.no_grad():
            alone = loss_of(batches[0])
        expected = switch_loss(batches[0].detach().softmax(-1), 2)
        torch.testing.assert_close(alone, expected, rtol=1e-13, atol=0)
        counts.reset()


def test_a_layer_that_is_used_twice_is_recomputed_with_its_own_counts():
    """The backward pass recomputes the second use of a repeated prediction block first."""
    config = with_losses(router(2, pre_softmax=True), "global_load_balancing_loss")
    batches = [random_logits(20, 8, seed=n) for n in range(2)]

    def gradients(recomputed):
        counts, totals = GlobalCounts(), []
        leaves = [batch.clone().requires_grad_() for batch in batches]

        def use(logits_TE, batch):
            tokens = SharedTokens(1, len(logits_TE))
            routing = route(logits_TE, config, 8, tokens, True, None)
            with_others = partial(counts.with_micro_batch, batch)
            computed = losses(routing, logits_TE, config, 8, tokens, with_others)
            return logits_TE.roll(1), computed["global_load_balancing_loss"]

        run = partial(checkpoint, use, use_reentrant=False) if recomputed else use
        for batch, leaf in zip(batches, leaves, strict=True):
            again_TE, first = run(leaf, batch)
            totals.append(first + run(again_TE, batch)[1])
        for total in totals:
            total.backward()
        return [leaf.grad for leaf in leaves]

    for ours, whole in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, whole)


def test_global_loss_has_the_choices_of_all_data_parallel_ranks():
    config = with_losses(router(2, pre_softmax=True), "global_load_balancing_loss")
    ranks = [random_logits(20, 8, seed=n) for n in range(3)]

    def of_rank(tokens):
        counts = GlobalCounts(tokens.group)
        return losses_of(ranks[tokens.group.rank], config, counts=counts)

    computed = [each["global_load_balancing_loss"] for each in on_ranks(3, 1, 20, False, of_rank)]
    expected = switch_loss(torch.cat(ranks).softmax(-1), 2)
    assert computed[0] != computed[1]
    torch.testing.assert_close(sum(computed) / 3, expected, rtol=1e-13, atol=0)


def test_tokens_of_padding_are_in_no_loss():
    logits_TE = random_logits(12, 8)
    config = with_losses(router(2))
    expected = losses_of(logits_TE[:9], config, samples=3)

    class Padded(SharedTokens):
        @property
        def samples_T(self):
            return torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, -1, -1, -1])

    tokens = Padded(3, 3)
    routing: Routing = route(logits_TE, config, 8, tokens, True)
    assert (routing.experts_TK[9:] == 8).all()
    torch.testing.assert_close(losses(routing, logits_TE, config, 8, tokens), expected)


def test_bias_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    bias_E = expected = torch.zeros(8)
    for _ in range(5):
        counts = torch.randint(0, 50, (8,), generator=generator)
        mean = sum(counts.tolist()) / 8
        steps = [0.0] * 8
        for expert, count in enumerate(counts.tolist()):
            if count > mean:
                steps[expert] = -0.001
            elif count < mean:
                steps[expert] = 0.001
        expected = expected + torch.tensor(steps)
        bias_E = updated_bias(bias_E, counts, 1e-3)
        assert torch.equal(bias_E, expected)
    assert torch.equal(updated_bias(bias_E, torch.full((8,), 7), 1e-3), bias_E)
    assert bias_E.dtype == torch.float32


def test_global_counts_of_a_layer_begin_again_with_each_step():
    """The layer's own counts, over two steps of two micro batches, the first of which is judged
    again."""
    config = model_config(
        num_layers=1, num_experts=(4,), padded_vocab_size=64, unpadded_vocab_size=64,
        moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(0.01,),
    )  # fmt: skip
    mlp = build_model(config).blocks()[0].mlp.double()
    for param in mlp.parameters():
        torch.nn.init.normal_(param, std=0.5)
    balances = Balances({0: mlp.balance}, Mesh())
    batches = torch.randn(2, 2, 8, 8, dtype=torch.float64)

    def step():
        computed = []
        for x_BSH in batches:
            zero = {"global_load_balancing_loss": torch.zeros(())}
            _, state = mlp(x_BSH, LayerState(x_BSH, losses=zero))
            computed.append(float(state.losses["global_load_balancing_loss"]))
        return computed

    first = step()
    balances.forget_step()
    again = step()
    balances.end_step()
    assert first == again == step() and first[0] != first[1]
    logits_TE = [batch.flatten(0, 1) @ mlp.router.weight.T for batch in batches]
    counts_E = sum(chosen_map(each.topk(2).indices, 4).sum(0) for each in logits_TE)
    shares_E = (counts_E.double() / counts_E.sum()).tolist()
    expected = switch_loss(logits_TE[1].softmax(-1), 2, shares_E)
    assert first[1] == pytest.approx(float(expected), rel=1e-12)


def test_global_loss_over_data_ranks_against_loops():
    """Each rank has the shares of all ranks' choices in the step so far, and the probabilities of
    its own micro batch."""
    config = with_losses(router(2, pre_softmax=True), "global_load_balancing_loss")
    logits = [[random_logits(12, 4, seed=2 * rank + n) for n in range(2)] for rank in range(2)]

    def of_rank(tokens):
        counts, results = GlobalCounts(tokens.group), []
        for logits_TE in logits[tokens.group.rank]:
            logits_TE = logits_TE.clone().requires_grad_()
            loss = losses_of(logits_TE, config, counts=counts)["global_load_balancing_loss"]
            loss.backward()
            results.append((loss.detach(), logits_TE.grad))
        return results

    counts_E = torch.zeros(4)
    results = on_ranks(2, 1, 12, False, of_rank)
    for n in range(2):
        for rank in range(2):
            counts_E += chosen_map(logits[rank][n].topk(2).indices, 4).sum(0)
        shares_E = (counts_E.double() / counts_E.sum()).tolist()
        for rank in range(2):
            logits_TE = logits[rank][n].clone().requires_grad_()
            expected = switch_loss(logits_TE.softmax(-1), 2, shares_E)
            expected.backward()
            loss, grad = results[rank][n]
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(grad, logits_TE.grad, rtol=1e-11, atol=1e-13)
