"""The layer of experts against a loop over experts and tokens, in float64."""

import pytest
import torch
import torch.nn.functional as F
from configs import model_config

from megatron.families import build_model
from megatron.features.evaluation.scoring import TEXT_SCORES
from megatron.features.experts.exchange import ExpertRanks
from megatron.model.layer_list import LayerState, initialise
from megatron.parallel.loss_head import Targets
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel

HIDDEN, INNER, TOKENS, EXPERTS = 16, 24, 20, 6
MODELS = {
    "post": {},
    "pre": {"moe_router_pre_softmax": True},
    "top1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all": {"moe_router_topk": EXPERTS},
    "sigmoid": {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "biased": {"add_bias_linear": True, "moe_router_bias": True, "swiglu": False},
    "shared": {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
    "latent": {"moe_latent_size": 8},
    "input": {
        "moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True,
    },
}  # fmt: skip


def layer(**fields):
    """A layer of experts with weights of which none is zero."""
    fields = {
        "num_layers": 1, "num_experts": (EXPERTS,), "hidden_size": HIDDEN,
        "num_attention_heads": 2, "seq_length": TOKENS // 2,
        "moe_ffn_hidden_size": INNER, "swiglu": True, "add_bias_linear": False,
        "padded_vocab_size": 64, "unpadded_vocab_size": 64,
        "max_position_embeddings": TOKENS,
    } | fields  # fmt: skip
    stack = build_model(model_config(**fields)).double()
    for name, param in stack.canonical_parameters():
        param.init = Init(std=0.5)
        initialise(name, param, 1)
    mlp = stack.blocks()[0].mlp
    if mlp.router.expert_bias is not None:
        values = torch.linspace(-0.2, 0.2, EXPERTS, dtype=torch.float64)
        mlp.router.expert_bias.values = values
    return mlp


def scores(mlp, x_H):
    """Experts and weights of one token."""
    part, router = mlp.part, mlp.router
    k = part.moe_router_topk
    logits_E = router.weight @ x_H + (0 if router.bias is None else router.bias)
    if part.moe_router_score_function == "sigmoid":
        scores_E = logits_E.sigmoid()
        chosen_K = (scores_E + router.expert_bias.values).topk(k).indices
        weights_K = scores_E[chosen_K] / scores_E[chosen_K].sum()
    elif part.moe_router_pre_softmax:
        weights_K, chosen_K = logits_E.softmax(0).topk(k)
    else:
        best_K, chosen_K = logits_E.topk(k)
        weights_K = best_K.softmax(0)
    return chosen_K.tolist(), weights_K * (part.moe_router_topk_scaling_factor or 1.0)


def expected(mlp, x_BSH):
    """The output of the layer, token by token."""
    up, down, outputs = mlp.experts.up, mlp.experts.down, []
    for x_H in x_BSH.flatten(0, 1):
        into_H = x_H if mlp.latent_in is None else mlp.latent_in.weight @ x_H
        total_H = torch.zeros_like(into_H)
        for expert, weight in zip(*scores(mlp, x_H), strict=True):
            before = weight if mlp.part.moe_apply_probs_on_input else 1.0
            inner = F.linear(before * into_H, up.weight[expert], _row(up.bias, expert))
            gated = mlp.experts.activation(inner)
            y_H = F.linear(gated, down.weight[expert], _row(down.bias, expert))
            total_H = total_H + (1.0 if mlp.part.moe_apply_probs_on_input else weight) * y_H
        outputs.append(total_H if mlp.latent_out is None else mlp.latent_out.weight @ total_H)
    y_BSH = torch.stack(outputs).view_as(x_BSH)
    if mlp.shared is not None:
        y_BSH = y_BSH + mlp.shared(x_BSH) * torch.sigmoid(x_BSH @ mlp.shared_gate.weight.T)
    return y_BSH


def _row(bias, expert):
    return None if bias is None else bias[expert]


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_against_a_loop(fields):
    mlp, torch_seed = layer(**fields), torch.manual_seed(3)
    x_BSH = torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    grad_BSH = torch.randn(x_BSH.shape, dtype=torch.float64, generator=torch_seed)
    inputs = [x_BSH, *mlp.parameters()]
    y_BSH, _ = mlp(x_BSH, LayerState(x_BSH))
    ours = torch.autograd.grad(y_BSH, inputs, grad_BSH)
    theirs_BSH = expected(mlp, x_BSH)
    theirs = torch.autograd.grad(theirs_BSH, inputs, grad_BSH)
    torch.testing.assert_close(y_BSH, theirs_BSH, rtol=1e-12, atol=1e-12)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"swiglu": False, "add_bias_linear": True}])
def test_padded_rows_do_not_depend_on_their_number(dtype, fields):
    """With one number of rows of every product, and a width that is no multiple of a vector."""
    experts = layer(moe_ffn_hidden_size=37, hidden_size=128, **fields).experts.to(dtype)
    x_RH = torch.randn(24, 128, generator=torch.Generator().manual_seed(3)).to(dtype)
    for first in range(0, 24, 7):

        def computed(begin, end, sizes):
            return experts(x_RH[begin:end], [0, *sizes, 0, 0], lambda rows: 32)

        with torch.no_grad():
            whole_RH = computed(0, 24, [0, 14, 10])
            part_RH = computed(first, 24, [0, max(0, 14 - first), min(10, 24 - first)])
        assert torch.equal(part_RH, whole_RH[first:])


def test_scored_texts_do_not_depend_on_their_batch():
    """A capacity limits the experts of a batch; where samples are scored, each is as alone."""
    mlp = layer(moe_expert_capacity_factor=0.5).eval()
    x_BSH = torch.randn(4, TOKENS // 2, HIDDEN, dtype=torch.float64)

    def outputs(x_BSH, apart):
        state = LayerState(x_BSH, targets=Targets(x_BSH, x_BSH))
        state = TEXT_SCORES.start(state) if apart else state
        return mlp(x_BSH, state)[0]

    with torch.no_grad():
        alone = torch.cat([outputs(sample[None], True) for sample in x_BSH])
        together, limited = outputs(x_BSH, True), outputs(x_BSH, False)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-13)
    assert (limited - together).abs().max() > 0.1


@pytest.mark.parametrize("sequence, experts, summed", [
    (True, "cut", True), (False, "cut", False), (False, "whole", True), (False, "folded", True),
])  # fmt: skip
def test_gradients_of_routers_are_summed_where_ranks_route_different_tokens(
    sequence, experts, summed
):
    """In every backward pass, unless an engine sums them once a step."""
    ranks = ExpertRanks(TensorParallel(Group((0, 1), 0), sequence=sequence, experts=experts))
    param = torch.nn.Parameter(torch.ones(2, 3))
    (shared,) = ranks.shared(param)
    assert (shared is not param) == summed
    assert ("SumGradients" in type(shared.grad_fn).__name__) == summed
