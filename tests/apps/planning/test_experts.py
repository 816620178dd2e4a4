"""Plans of models with experts: parameters, FLOPs, memory and traffic of expert-parallel ranks."""

import dataclasses

import pytest
import torch
from tool_modules import load_program

from megatron.apps.parity.layouts import parse_layout
from megatron.apps.planning.memory import rank_memory
from megatron.apps.planning.parameters import layer_shares, model_parameters, rank_shares
from megatron.apps.planning.search import Workload, layouts
from megatron.apps.planning.step_time import Hardware, expert_bytes_per_block, step_time
from megatron.config import ModelFlags
from megatron.config.layouts import Layout
from megatron.families import family_of, spec_of
from megatron.features.experts.costs import active_parameters, layer_costs, with_experts
from megatron.parallel.mesh import Group
from megatron.parallel.tensor_parallel import TensorParallel

LAYERS = {"num_experts": (8,), "moe_layer_freq": "[0]+[1]*3", "moe_ffn_hidden_size": 96}
SHARED = LAYERS | {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}


def published(**changes):
    """A model with SwiGLU and grouped queries; the names are the flags."""
    flags = {
        "hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32, "kv_channels": 128,
        "seq_length": 4096, "max_position_embeddings": 4096, "swiglu": True,
        "add_bias_linear": False, "normalization": "RMSNorm", "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    vocabulary = changes.pop("vocabulary")
    return ModelFlags(**flags | changes).resolve().with_vocabulary(vocabulary)


MIXTRAL = {
    "num_query_groups": 8, "ffn_hidden_size": 14336, "num_experts": (8,), "vocabulary": 32000,
}  # fmt: skip
QWEN3 = {
    "num_layers": 48, "hidden_size": 2048, "num_query_groups": 4, "ffn_hidden_size": 6144,
    "moe_ffn_hidden_size": 768, "num_experts": (128,), "moe_router_topk": 8, "qk_layernorm": True,
    "vocabulary": 151936,
}  # fmt: skip
OLMOE = {
    "num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 16,
    "ffn_hidden_size": 1024, "num_experts": (64,), "moe_router_topk": 8, "vocabulary": 50304,
}  # fmt: skip
DENSE_FIRST = MIXTRAL | {
    "moe_layer_freq": "[0]+[1]*31", "moe_shared_expert_intermediate_size": 2048,
    "moe_shared_expert_gate": True, "moe_ffn_hidden_size": 1024, "moe_latent_size": 512,
}  # fmt: skip
RESIDUAL = MIXTRAL | {"mlp_type": "residual", "moe_router_topk": 1, "moe_router_pre_softmax": True}


@pytest.mark.parametrize(
    "flags, billions, active",
    [
        # Their model cards; the paper of OLMoE (arXiv:2409.02060) has 6.92 and 1.28.
        (MIXTRAL, 46.7, 12.9), (QWEN3, 30.5, 3.3), (OLMOE, 6.92, 1.28),
    ],
)  # fmt: skip
def test_parameters_against_published_ones(flags, billions, active):
    model = published(**flags)
    total = model_parameters(model)
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)
    assert active_parameters(model, total) / 1e9 == pytest.approx(active, rel=2e-2)


@pytest.mark.parametrize("flags", [MIXTRAL, QWEN3, DENSE_FIRST, RESIDUAL])
def test_flops_are_those_of_the_products_of_a_token(flags):
    """Twice the weights of each matrix that a token of a built layer is multiplied with, of the
    experts only those that it chooses."""
    model = published(**flags)
    chosen = flags.get("moe_router_topk", 2)
    used = model.hidden_size * flags["vocabulary"]  # the head
    with torch.device("meta"):
        blocks = [layer.build() for layer in spec_of(model).layers(TensorParallel()) if layer.block]
    for name, param in (pair for block in blocks for pair in block.named_parameters()):
        if param.dim() > 1:
            used += param.numel() * (chosen / param.shape[0] if ".experts." in name else 1)
    shape = with_experts(family_of(model.family).shape(model), model)
    scores = model.num_layers * 4096 * 4 * 4096
    assert shape.flops_per_token(causal=False) == pytest.approx(3 * (2 * used + scores), rel=1e-9)


NAMES = ["ep2", "ep4", "tp2-ep2", "tp2-etp1", "tp2-ep2-etp1", "tp2-ep4-etp1", "pp2-ep2"]


@pytest.mark.parametrize("name", NAMES)
def test_shares_against_built_layers(small, name):
    """Layers built for rank 0 of groups as the mesh has them."""
    layout = parse_layout(name)
    model = small("llama", layout.tensor, **SHARED)
    how = "cut"
    if layout.expert_tensor is not None:
        how = "folded" if layout.expert > 1 else "whole"
    axes = {
        ("expert",): Group(tuple(range(layout.expert_axis))),
        ("expert", "tensor"): Group(tuple(range(layout.expert_axis * layout.tensor))),
    }
    tp = TensorParallel(Group(tuple(range(layout.tensor))), axes=axes, experts=how)
    with torch.device("meta"):
        built = [layer.build() for layer in spec_of(model).layers(tp)]
    shares = rank_shares(model, layout)
    sizes = [(n, p.numel()) for layer in built for n, p in layer.named_parameters()]
    assert sum(share.parameters for share in shares) == sum(size for _, size in sizes)
    experts = sum(size for n, size in sizes if ".experts." in n)
    assert sum(share.experts for share in shares) == experts > 0
    assert [share.routed for share in shares] == ([(1,), (2,)] if layout.pipeline > 1 else [(3,)])


@pytest.mark.parametrize("zero", range(4))
def test_zero_divides_experts_over_ranks_that_have_the_same(small, zero):
    """As Adam in bf16 has them: 2 bytes of weights, 12 of float32 weights and moments."""
    model = small("llama", **LAYERS)
    layout = Layout(data=8, expert=4, zero=zero, precision="bf16")
    (share,) = rank_shares(model, layout)
    memory = rank_memory(model, layout, 1, 1, share)
    experts = 3 * 8 * 3 * 64 * 96 / 4
    assert share.experts == experts
    dense = share.parameters - experts
    if zero:
        assert memory.optimizer == pytest.approx(12 * (dense / 8 + experts / 2))
        divided = dense / 8 + experts / 2 if zero == 3 else dense + experts
        assert memory.weights == pytest.approx(2 * divided)
    else:
        assert memory.weights == 4 * share.parameters
        assert memory.optimizer == 8 * share.parameters
    dense = rank_memory(model, dataclasses.replace(layout, expert=1), 1, 1, share)
    assert (memory.optimizer > dense.optimizer) == (zero > 0)


def test_rows_travel_there_and_back_in_both_passes(small):
    model = small("llama", **LAYERS)
    row = 2 * 128 * 2 * 64 * 4  # samples, tokens, experts of each, hidden size, float32
    each = expert_bytes_per_block(model, parse_layout("ep4"), 2)
    assert each == pytest.approx(row * 4 * 3 / 4)
    assert expert_bytes_per_block(model, parse_layout("ep4-uniform"), 2) == each * 6 / 4
    assert expert_bytes_per_block(model, parse_layout("ep4-bf16-zero1"), 2) == each / 2
    assert expert_bytes_per_block(model, parse_layout("tp2-ep4"), 2) == each
    assert expert_bytes_per_block(model, parse_layout("tp2-ep4-etp1"), 2) == each / 2


def test_a_busy_rank_makes_a_step_longer(small):
    model, layout = small("llama", **LAYERS), parse_layout("ep4-zero1")
    shares = rank_shares(model, layout)
    hardware = Hardware(gpus=4)
    even, sent = step_time(model, layout, 2, 3, shares, hardware)
    busy = dataclasses.replace(hardware, expert_imbalance=3.0)
    uneven, sent_3 = step_time(model, layout, 2, 3, shares, busy)
    rows = 3 * 3 * expert_bytes_per_block(model, layout, 2)
    assert sent.expert == pytest.approx(rows) and sent_3.expert == pytest.approx(3 * rows)
    experts = 3 * layer_costs(model, 8).chosen * 2 * 128 * 2 * 3 * 3  # products of a step
    assert uneven.compute - even.compute == pytest.approx(2 * experts / hardware.flops)
    alone = parse_layout("dp4-zero1")
    assert step_time(model, alone, 2, 3, rank_shares(model, alone), busy)[0].expert == 0


def test_ranks_of_every_plan_divide_experts(small):
    model = small("llama", num_experts=(8, 4), moe_layer_freq="[0,1,0,1]", moe_ffn_hidden_size=96)
    work = Workload(model, 61, 64, micro_batch_size=1)
    actual = {layout for layout, _ in layouts(work, Hardware(gpus=16))}
    assert {a.expert for a in actual} == {1, 2, 4}
    assert all(a.data % a.expert_axis == 0 and a.processes == 16 for a in actual)
    assert {(a.tensor, a.expert) for a in actual if a.expert_tensor} == {
        (2, 1), (2, 2), (2, 4), (4, 1), (4, 4),
    }  # fmt: skip
    (plain,) = {a.expert for a, _ in layouts(Workload(small(), 61, 64), Hardware(gpus=4))}
    assert plain == 1


def test_the_command_names_active_parameters_and_traffic(capsys):
    words = (
        "--gpus 8 --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --swiglu "
        "--seq-length 2048 --vocab-size 32000 --global-batch-size 64 --bf16 --num-experts 32 "
        "--moe-ffn-hidden-size 4096 --gpu-memory 20GiB"
    )
    assert load_program("tools/plan.py").main(words.split()) == 0
    told = capsys.readouterr().out
    assert "B active for a token" in told and "--expert-imbalance 1" in told
    assert "GB of tokens to experts and back in a step; with --expert-imbalance 2" in told
    assert "--expert-model-parallel-size" in told.splitlines()[-1]


def test_shares_of_a_dense_model_have_no_experts(small):
    assert all(layer.experts == 0 for layer in layer_shares(small(), 1))
