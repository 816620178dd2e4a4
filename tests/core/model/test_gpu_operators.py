"""Models through the operators for GPUs, by their formulas, against models without them."""

import pytest
import torch
from gpt_forward import forward
from small_gpts import BATCH, KINDS, LENGTH, VOCAB, small_config, small_gpt

from megatron.kernels import switches
from megatron.model import activations, attention
from megatron.model.attention import Attention
from megatron.model.block import Block
from megatron.parallel.loss_head import Targets

CPU = torch.device("cpu")
CALLS: list[str] = []
MODELS = {name: KINDS[name] for name in ("llama", "gpt-oss", "neox", "longrope", "window")} | {
    "gated-queries": KINDS["llama"] | {"attention_output_gate": True},
    "norms-after-rope": KINDS["llama"]
    | {"qk_layernorm": True, "qk_layernorm_after_rope": True, "rotary_interleaved": True},
    "geglu": KINDS["llama"] | {"swiglu": False, "glu_activation": "geglu"},
}


@pytest.fixture
def operators(monkeypatch):
    """Calls that a GPU would send through the operators go there."""

    def uses(name, x):
        CALLS.append(name)
        return switches.SWITCHES[name]

    CALLS.clear()
    for module in (activations, attention):
        monkeypatch.setattr(module, "uses", uses)


def gradients(stack, positions: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH)
    ids = torch.arange(LENGTH).expand(BATCH, -1).clone()
    ids[1, LENGTH // 2 :] -= LENGTH // 2
    stack.zero_grad()
    loss = forward(
        stack, tokens, ids if positions else None, targets=Targets(tokens.roll(-1, 1), mask)
    )
    loss.backward()
    return loss.detach(), [p.grad for p in stack.parameters()]


CASES = [*((kind, None) for kind in MODELS), ("llama", "selective"), ("llama", "full")]


@pytest.mark.parametrize("kind, recompute", CASES)
def test_a_model_through_operators(kind, recompute, operators):
    stack = small_gpt(CPU, torch.float64, recompute=recompute, **MODELS[kind])
    torch.manual_seed(0)
    for param in stack.parameters():
        torch.nn.init.normal_(param, std=0.1)
    for positions in (False, True):
        CALLS.clear()
        loss, grads = gradients(stack, positions)
        assert {"swiglu", "rope"} == set(CALLS)
        with switches.switched(swiglu=False, rope=False):
            plain, expected = gradients(stack, positions)
        torch.testing.assert_close(loss, plain, rtol=1e-13, atol=0)
        scale = max(grad.abs().max().item() for grad in expected)
        for grad, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, theirs, rtol=1e-11, atol=1e-14 * scale)


def test_a_block_is_one_graph(operators):
    from torch._dynamo.utils import counters

    stack = small_gpt(CPU, torch.float32, **KINDS["llama"])
    counters.clear()
    torch._dynamo.reset()
    for block in stack.blocks():
        assert isinstance(block, Block)
        block.forward = torch.compile(block.forward, backend="aot_eager", dynamic=False)
    gradients(stack)
    assert not counters["graph_break"]
    assert {"swiglu", "rope"} == set(CALLS)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "changes",
    [{"qk_layernorm": True}, {"clip_qkv": 1.0}, {"position_embedding_type": "learned_absolute"}],
    ids=str,
)
def test_what_is_between_projection_and_rope_keeps_its_path(changes):
    from megatron.parallel.tensor_parallel import TensorParallel

    config = small_config(**KINDS["llama"] | changes)
    assert Attention(config, 0, TensorParallel(), False).packed is None
    assert Attention(small_config(**KINDS["llama"]), 0, TensorParallel(), False).packed is not None
