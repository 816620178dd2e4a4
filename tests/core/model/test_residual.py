"""The residual stream in float32 under 16 bits, against a loop in torch: logits and gradients."""

import pytest
import torch
import torch.nn.functional as F
from gpt_forward import forward
from small_gpts import BATCH, KINDS, LENGTH, VOCAB, small_config, small_gpt
from torch import Tensor

from megatron.config import ConfigError
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerStack, LayerState, initialise

BF16 = torch.bfloat16
TOKENS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 % VOCAB


def built(**changes) -> tuple[LayerStack, dict[str, Tensor]]:
    stack = small_gpt(torch.device("cpu"), BF16, init_method_std=0.3, **changes)
    named = dict(stack.canonical_parameters())
    for name, param in named.items():
        initialise(name, param, seed=5)
    return stack, named


def reference(named: dict[str, Tensor], tokens_BS: Tensor) -> Tensor:
    """Logits of GPT-2's network: all in bfloat16 but the stream and the statistics of norms."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, named[f"{name}.weight"], named[f"{name}.bias"])

    table = named["embedding.word_embeddings.weight"]
    positions = named["embedding.position_embeddings.weight"]
    x = (F.embedding(tokens_BS, table) + positions[: tokens_BS.shape[1]]).float()
    for number in range(2):
        of = f"layers.{number}"
        mixed = linear(norm(x, named, f"{of}.attention_norm"), f"{of}.attention.qkv")
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in mixed.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(attended.transpose(1, 2).flatten(2), f"{of}.attention.proj")
        inner = F.gelu(linear(norm(x, named, f"{of}.mlp_norm"), f"{of}.mlp.up"), approximate="tanh")
        x = x + linear(inner, f"{of}.mlp.down")
    return F.linear(norm(x, named, "final_norm.norm"), table)


def norm(x: Tensor, named: dict[str, Tensor], name: str) -> Tensor:
    weight, bias = named[f"{name}.weight"].float(), named[f"{name}.bias"].float()
    return F.layer_norm(x.float(), (64,), weight, bias, 1e-5).to(BF16)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_logits_and_gradients_against_a_loop(recompute):
    """The loop has other kernels, which round differently."""
    stack, named = built(fp32_residual_connection=True, recompute=recompute)
    params = list(named.values())

    def of(logits: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad(logits.float()[..., :VOCAB].tanh().sum(), params)
        return [logits.detach()[..., :VOCAB].float(), *map(Tensor.float, gradients)]

    ours, wide = of(forward(stack, TOKENS)), of(reference(named, TOKENS))
    for name, found, expected in zip(["logits", *named], ours, wide, strict=True):
        distance = torch.linalg.vector_norm(found - expected)
        assert distance <= 5e-2 * torch.linalg.vector_norm(expected), name


@torch.no_grad()
def test_sums_are_float32_bit_for_bit():
    """Sum the outputs of attention and MLP, which are bfloat16, as are their inputs."""
    stack, named = built(fp32_residual_connection=True)
    streams: list[Tensor] = []
    stack.sequence.observe(lambda _, state: streams.append(state.hidden))
    logits = forward(stack, TOKENS)
    state = LayerState(TOKENS, masks=AttentionMasks())
    table = named["embedding.word_embeddings.weight"]
    x = F.embedding(TOKENS, table) + named["embedding.position_embeddings.weight"][:LENGTH]
    expected = [x, x.float()]
    for number, block in enumerate(stack.blocks()):
        x = expected[-1]
        y = x + block.attention(norm(x, named, f"layers.{number}.attention_norm"), state)
        expected.append(y + block.mlp(norm(y, named, f"layers.{number}.mlp_norm")))
    assert [stream.dtype for stream in streams[1:4]] == [torch.float32] * 3
    for ours, theirs in zip(streams[1:4], expected[1:], strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(streams[3], streams[3].to(BF16).float())
    assert logits.dtype == BF16


@pytest.mark.parametrize("kind", ["gemma2", "bloom", "neox"])
def test_other_networks_keep_their_results(kind):
    """In float32 the flag changes nothing; in bfloat16 it brings every network nearer to that."""
    exact, wide, plain = (
        built(**KINDS[kind], fp32_residual_connection=wide)[0] for wide in (True, True, False)
    )
    logits = {}
    with torch.no_grad():
        for name, stack in (("exact", exact.float()), ("wide", wide), ("plain", plain)):
            logits[name] = forward(stack, TOKENS).float()
    errors = {name: float((found - logits["exact"]).norm()) for name, found in logits.items()}
    assert 0 < errors["wide"] < errors["plain"], errors


def test_a_stream_of_normed_states_is_refused():
    with pytest.raises(ConfigError, match="contradicts --apply-residual-connection-post-layernorm"):
        small_config(fp32_residual_connection=True, apply_residual_connection_post_layernorm=True)
