"""Choices and weights of routers: as those of transformers' models, and by formulas."""

import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from rank_threads import joined, on_ranks, part_of
from routers import chosen_map, in_float64, random_logits, routed, router, weight_map

from megatron.features.experts.balance import losses
from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.router import logits, route

HIDDEN, EXPERTS, TOKENS = 12, 16, 40
FOUR_GROUPS = dict(num_groups=4, group_topk=2)
DEEPSEEK_V3 = dict(score_function="sigmoid", enable_expert_bias=True, topk_scaling_factor=2.5)
PRE = dict(pre_softmax=True)
TRANSFORMERS = {
    # model, its gate's fields, ours
    "mixtral": ("mixtral.MixtralTopKRouter", {}, router()),
    "qwen2_moe": ("qwen2_moe.Qwen2MoeTopKRouter", dict(norm_topk_prob=False), router(4, **PRE)),
    "qwen3_moe": (
        "qwen3_moe.Qwen3MoeTopKRouter",
        dict(norm_topk_prob=True),
        router(4, normalize=True, **PRE),
    ),
    "qwen3_moe softmax after": (
        "qwen3_moe.Qwen3MoeTopKRouter",
        dict(norm_topk_prob=True),
        router(4),
    ),
    "olmoe": ("olmoe.OlmoeTopKRouter", dict(norm_topk_prob=False), router(8, **PRE)),
    "flex_olmo": ("flex_olmo.FlexOlmoTopKRouter", dict(norm_topk_prob=False), router(5, **PRE)),
    "hunyuan": ("hunyuan_v1_moe.HunYuanMoEV1Gate", {}, router(1, normalize=True, **PRE)),
    "granite": ("granitemoe.GraniteMoeTopKRouter", {}, router(8)),
    "gpt_oss": ("gpt_oss.GptOssTopKRouter", {}, router(4)),
    "ernie": (
        "ernie4_5_moe.Ernie4_5_MoeTopKRouter",
        dict(moe_norm_min=1e-12),
        router(6, enable_expert_bias=True, normalize=True, **PRE),
    ),
    "deepseek_v2 greedy": (
        "deepseek_v2.DeepseekV2TopkRouter",
        dict(topk_method="greedy", n_group=None, topk_group=None, routed_scaling_factor=1.0),
        router(6, **PRE),
    ),
    "deepseek_v2 groups": (
        "deepseek_v2.DeepseekV2TopkRouter",
        dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16),
        router(6, topk_scaling_factor=16.0, group_score="max", **FOUR_GROUPS, **PRE),
    ),
    "deepseek_v3": (
        "deepseek_v3.DeepseekV3TopkRouter",
        dict(n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True),
        router(4, **FOUR_GROUPS, **DEEPSEEK_V3),
    ),
    "deepseek_v3 not normalized": (
        "deepseek_v3.DeepseekV3TopkRouter",
        dict(n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=False),
        router(4, normalize=False, **FOUR_GROUPS, **DEEPSEEK_V3),
    ),
    "glm4_moe": (
        "glm4_moe.Glm4MoeTopkRouter",
        dict(n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True),
        router(8, **DEEPSEEK_V3),
    ),
    "dots1": (
        "dots1.Dots1TopkRouter",
        dict(n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True),
        router(4, **FOUR_GROUPS, **DEEPSEEK_V3),
    ),
    "minimax_m2": (
        "minimax_m2.MiniMaxM2TopKRouter",
        {},
        router(4, score_function="sigmoid", enable_expert_bias=True),
    ),
    "phimoe": (
        "phimoe.PhimoeTopKRouter",
        dict(router_jitter_noise=0.01, input_jitter_noise=0.0),
        router(gate="sparsemixer"),
    ),
}


def their_gate(name: str, fields: dict, k: int):
    """A gate of transformers with random weights in float64, its module, and its expert bias."""
    module_name, class_name = name.split(".")
    module = import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    common = dict(num_experts=EXPERTS, num_local_experts=EXPERTS, hidden_size=HIDDEN)
    config = SimpleNamespace(**common, num_experts_per_tok=k, moe_topk=k, **fields)
    gate = getattr(module, class_name)(config).double().eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in gate.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).double()
    bias_E = 0.3 * torch.randn(EXPERTS, generator=generator).double()
    if hasattr(gate, "moe_statics"):
        gate.moe_statics.e_score_correction_bias.data = bias_E[None]
    else:
        gate.e_score_correction_bias = bias_E
    return gate, module, bias_E


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_choices_weights_and_gradients_of_transformers(case):
    name, fields, config = TRANSFORMERS[case]
    gate, module, bias_E = their_gate(name, fields, config.moe_router_topk)
    generator = torch.Generator().manual_seed(4)
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator).double().requires_grad_()
    factor_TE = torch.randn(TOKENS, EXPERTS, generator=generator).double()
    with in_float64(module):
        arguments = [bias_E] if "MiniMax" in name else []
        _, theirs_TK, their_experts_TK = gate(x_TH, *arguments)
    weight = gate.wg.weight if hasattr(gate, "wg") else gate.weight
    gate_bias = gate.bias if "GptOss" in name else None
    parameters = [x_TH, weight, *([] if gate_bias is None else [gate_bias])]
    theirs_TE = weight_map(their_experts_TK, theirs_TK, EXPERTS)
    their_grads = torch.autograd.grad((theirs_TE * factor_TE).sum(), parameters)

    expert_bias_E = bias_E if config.moe_router_enable_expert_bias else None
    routing = routed(
        logits(x_TH, weight, gate_bias, None), config, training=False, expert_bias_E=expert_bias_E
    )
    ours_TE = weight_map(routing.experts_TK, routing.weights_TK, EXPERTS)
    grads = torch.autograd.grad((ours_TE * factor_TE).sum(), parameters)
    their_map_TE = chosen_map(their_experts_TK, EXPERTS)
    assert torch.equal(chosen_map(routing.experts_TK, EXPERTS), their_map_TE)
    torch.testing.assert_close(ours_TE, theirs_TE, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_llama4_weighs_its_expert_by_a_sigmoid():
    gate, module, _ = their_gate("llama4.Llama4Router", {}, 1)
    x_TH = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4)).double()
    with in_float64(module):
        theirs_TE, logits_TE = gate(x_TH)
    routing = routed(logits_TE, router(1, score_function="sigmoid"))
    ours_TE = weight_map(routing.experts_TK, routing.weights_TK, EXPERTS)
    torch.testing.assert_close(ours_TE, theirs_TE, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_logits_are_not_narrower_than_their_inputs(dtype):
    """Comparisons in float64 would show rounding to float32."""
    x_TH, weight_EH = (
        random_logits(n, HIDDEN).double().requires_grad_() for n in (TOKENS, EXPERTS)
    )
    ours_TE = logits(x_TH, weight_EH, None, dtype)
    assert torch.equal(ours_TE, x_TH @ weight_EH.T)
    half_TE = logits(x_TH.bfloat16(), weight_EH.bfloat16(), None, dtype)
    assert half_TE.dtype == (dtype or torch.bfloat16)


def test_square_root_of_softplus_scores():
    logits_TE = random_logits(30, 8)
    config = router(3, score_function="sqrtsoftplus", topk_scaling_factor=1.5)
    routing = routed(logits_TE, config)
    scores_TE = (1 + logits_TE.exp()).log().sqrt()
    best_TK = scores_TE.topk(3).values
    assert torch.equal(routing.experts_TK, logits_TE.topk(3).indices)
    expected_TK = 1.5 * best_TK / best_TK.sum(1, keepdim=True)
    torch.testing.assert_close(routing.weights_TK, expected_TK, rtol=1e-13, atol=0)
    expected_TE = scores_TE / scores_TE.sum(1, keepdim=True)
    torch.testing.assert_close(routing.scores_TE, expected_TE, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("function", "normalize"), [("softmax", True), ("sigmoid", None)])
def test_expert_bias_changes_the_choice_and_not_the_weights(function, normalize):
    logits_TE = random_logits(30, 8)
    bias_E = torch.tensor([0, 0, 0, 0, 0, 0, 0, 5.0])
    fields = dict(score_function=function, normalize=normalize, pre_softmax=True)
    routing = routed(logits_TE, router(2, **fields), expert_bias_E=bias_E)
    scores_TE = logits_TE.softmax(-1) if function == "softmax" else logits_TE.sigmoid()
    first_of_rest_T = scores_TE[:, :-1].argmax(1)
    assert (routing.experts_TK[:, 0] == 7).all()
    assert torch.equal(routing.experts_TK[:, 1], first_of_rest_T)
    pair_T2 = torch.stack([scores_TE[:, 7], scores_TE.gather(1, first_of_rest_T[:, None])[:, 0]], 1)
    expected_T2 = pair_T2 / pair_T2.sum(1, keepdim=True)
    torch.testing.assert_close(routing.weights_TK, expected_T2, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("score", "best_groups", "summed"), [("top", 2, 3), ("max", 2, 1)])
def test_groups_against_a_loop(score, best_groups, summed):
    # Logits below zero: an expert that is masked to 0 instead of -inf would be the best.
    logits_TE = random_logits(50, 20) - 20.0
    fields = dict(num_groups=5, group_topk=best_groups, group_score=score)
    routing = routed(logits_TE, router(6, **fields))
    for token, row in enumerate(logits_TE.tolist()):
        groups = [range(4 * g, 4 * g + 4) for g in range(5)]
        best = sorted(groups, key=lambda g: sum(sorted(row[e] for e in g)[-summed:]))[-best_groups:]
        allowed = sorted((e for g in best for e in g), key=lambda e: -row[e])
        assert routing.experts_TK[token].tolist() == allowed[:6]


def kept_by_a_loop(experts_TK, weights_TK, experts, capacity, policy):
    """Pairs of token and expert that a capacity keeps."""
    kept = set()
    for expert in range(experts):
        pairs = [
            (-weights_TK[token, n].item() if policy == "probs" else 0, token)
            for token, n in (experts_TK == expert).nonzero().tolist()
        ]
        kept |= {(token, expert) for _, token in sorted(pairs)[:capacity]}
    return kept


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.3, 1.1, 1.25])
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_capacity_against_a_loop(policy, factor, step):
    logits_TE = random_logits(40, 8, dtype=torch.float32, step=step)
    fields = dict(score_function="sigmoid", topk_scaling_factor=2.0)
    whole = routed(logits_TE, router(3, **fields))
    fields |= dict(expert_capacity_factor=factor, token_drop_policy=policy)
    routing = routed(logits_TE, router(3, **fields))
    capacity = math.ceil(40 * 3 / 8 * factor)
    kept = kept_by_a_loop(whole.experts_TK, whole.weights_TK, 8, capacity, policy)
    assert 0 < len(kept) < 120
    dropped_TK = torch.tensor(
        [[(t, e) not in kept for e in row] for t, row in enumerate(whole.experts_TK.tolist())]
    )
    # What is kept has the weight that it had.
    assert torch.equal(routing.experts_TK, whole.experts_TK.masked_fill(dropped_TK, 8))
    assert torch.equal(routing.weights_TK, whole.weights_TK.masked_fill(dropped_TK, 0.0))


def test_capacity_of_evaluations_and_smallest_capacity():
    logits_TE = random_logits(40, 8)

    def largest(training: bool, **fields) -> int:
        routing = routed(logits_TE, router(2, **fields), training)
        return int(chosen_map(routing.experts_TK, 8).sum(0).max())

    unlimited = largest(True)
    factors = dict(expert_capacity_factor=0.5, eval_capacity_factor=1.0)
    assert unlimited > 10
    assert largest(True, **factors) == 5
    assert largest(False, **factors) == 10
    assert largest(False, expert_capacity_factor=0.5) == 5
    assert largest(True, min_capacity=7, **factors) == 7
    assert largest(True, expert_capacity_factor=100.0) == unlimited


def megatron_sinkhorn(cost, tol=1e-4):
    """Sinkhorn's iteration as Megatron-LM has it, on exp(logits)."""
    cost = cost.exp()
    rows, columns = torch.ones(cost.size(0)), torch.ones(cost.size(1))
    error, before = 1e9, columns
    while error > tol:
        rows = (1 / rows.size(0)) * 1 / (torch.sum(columns * cost, 1) + 1e-8)
        columns = (1 / columns.size(0)) * 1 / (torch.sum(rows.unsqueeze(1) * cost, 0) + 1e-8)
        error = torch.mean(torch.abs(before - columns))
        before = columns
    return columns * cost * rows.unsqueeze(1)


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_evens_out_choices_in_training(k):
    logits_TE = random_logits(64, 8)
    config = router(k, load_balancing_type=("sinkhorn",))
    routing, plain = (routed(logits_TE, config, training) for training in (True, False))
    expected_TE = chosen_map(megatron_sinkhorn(logits_TE).topk(k).indices, 8)
    assert torch.equal(chosen_map(routing.experts_TK, 8), expected_TE)
    assert torch.equal(plain.experts_TK, logits_TE.topk(k).indices)
    spread = [chosen_map(r.experts_TK, 8).sum(0).float().std() for r in (routing, plain)]
    assert spread[0] < spread[1] / 2
    scores_TE = logits_TE.sigmoid() if k == 1 else logits_TE.softmax(-1)
    for each in (routing, plain):
        assert torch.equal(each.weights_TK, scores_TE.gather(1, each.experts_TK))


def test_dtypes_of_results():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for gate in ("megatron", "deepspeed", "sparsemixer"):
            logits_TE = random_logits(10, 4, dtype=dtype)
            routing = routed(logits_TE, router(gate=gate))
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            assert routing.experts_TK.dtype == torch.int64
            assert routing.weights_TK.dtype == routing.scores_TE.dtype == wide
            wide_routing = routed(logits_TE.to(wide), router(gate=gate))
            assert torch.equal(routing.weights_TK, wide_routing.weights_TK)


@pytest.mark.parametrize("biased", [True, False])
def test_logits_in_another_dtype_than_the_model(biased):
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 8), (4, 8), (4,)][: 3 if biased else 2]
    inputs = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logits_TE = logits(inputs[0], inputs[1], inputs[2] if biased else None, torch.float64)
    # Nothing is stored in the wider dtype.
    assert {each.dtype for each in saved} == {torch.bfloat16}
    expected_TE = wide[0] @ wide[1].T + (wide[2] if biased else 0)
    assert logits_TE.dtype == torch.float64
    torch.testing.assert_close(logits_TE, expected_TE, rtol=1e-13, atol=1e-13)
    grad_TE = torch.randn(6, 4, generator=generator).double()
    expected = torch.autograd.grad(expected_TE, wide, grad_TE)
    for ours, theirs in zip(torch.autograd.grad(logits_TE, inputs, grad_TE), expected, strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    assert logits(inputs[0], inputs[1], None, None).dtype == torch.bfloat16


ALL_LOSSES = {f"{scope}load_balancing_loss": 1.0 for scope in ("", "seq_", "global_")} | {
    "z_loss": 1.0
}
SHARED = {
    "softmax": router(3),
    "probs": router(3, expert_capacity_factor=0.75),
    "position": router(3, expert_capacity_factor=0.75, token_drop_policy="position"),
    "sigmoid, groups, bias": router(
        4, expert_capacity_factor=1.0, **FOUR_GROUPS, **DEEPSEEK_V3
    ),
    "sinkhorn": router(2, load_balancing_type=("sinkhorn",)),
    "top-1": router(1, gate="deepspeed", expert_capacity_factor=1.0),
    "top-2": router(2, gate="deepspeed", expert_capacity_factor=0.7),
    "top-3": router(3, gate="deepspeed", expert_capacity_factor=0.7, min_capacity=2),
    "sparsemixer": router(2, gate="sparsemixer"),
}  # fmt: skip


def routing_and_losses(logits_TE, config, tokens):
    """Numbers that a rank computes of its tokens, and its gradient of the sum of all."""
    logits_TE = logits_TE.clone().requires_grad_()
    bias_E = torch.linspace(-0.5, 0.5, 16) if config.moe_router_enable_expert_bias else None
    routing = route(logits_TE, config, 16, tokens, True, bias_E, seed=5)
    computed = losses(routing, logits_TE, config, 16, tokens)
    # Weights do not depend on other tokens: a rank has the gradient of its own ones.
    terms = [*computed.values(), (routing.weights_TK * (1 + routing.experts_TK)).sum()]
    torch.stack(terms).sum().backward()
    return routing, {name: loss.detach() for name, loss in computed.items()}, logits_TE.grad


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize(("size", "sliced"), [(2, True), (4, True), (2, False), (5, False)])
def test_ranks_that_share_a_micro_batch_route_as_one(case, size, sliced):
    config = SimpleNamespace(**vars(SHARED[case]) | {"loss_weights": ALL_LOSSES})
    samples, length = 3, 4
    logits_NE = random_logits(samples * length, 16)
    one, one_losses, one_grad = routing_and_losses(
        logits_NE, config, SharedTokens(samples, length)
    )  # fmt: skip
    results = on_ranks(
        size,
        samples,
        length,
        sliced,
        lambda tokens: routing_and_losses(part_of(logits_NE, tokens), config, tokens),
    )
    count = samples * length
    for field in ("experts_TK", "weights_TK", "scores_TE"):
        parts = [getattr(routing, field) for routing, _, _ in results]
        assert torch.equal(joined(parts, samples, count, sliced), getattr(one, field)), field
    for _, rank_losses, _ in results:
        assert rank_losses.keys() == ALL_LOSSES.keys()
        torch.testing.assert_close(rank_losses, one_losses, rtol=1e-13, atol=0)
    grads_TE = joined([grad for _, _, grad in results], samples, count, sliced)
    torch.testing.assert_close(grads_TE, one_grad, rtol=1e-12, atol=1e-14)
    if not sliced:
        padding = torch.cat([routing.experts_TK for routing, _, _ in results])[count:]
        weights = torch.cat([routing.weights_TK for routing, _, _ in results])[count:]
        assert len(padding) == -(-count // size) * size - count
        assert (padding == 16).all()
        assert (weights == 0).all()
