"""Blocks against the layers of transformers: forward, and gradients of input and all weights.

Whole models, as they come from their folders, are compared in ``tests/core/checkpoint``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from configs import model_config
from torch import Tensor, nn
from transformers import BloomConfig, FalconConfig, Gemma2Config, GPTNeoXConfig, Qwen3Config
from transformers.models.bloom.modeling_bloom import BloomBlock, build_alibi_tensor
from transformers.models.falcon.modeling_falcon import FalconDecoderLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from megatron.model.attention_masks import AttentionMasks, causal_mask, window_mask
from megatron.model.block import Block
from megatron.model.layer_list import LayerState
from megatron.parallel.tensor_parallel import TensorParallel

HIDDEN, HEADS, WIDTH, INNER, LENGTH, BATCH = 32, 4, 8, 48, 10, 2
CPU = torch.device("cpu")
Pick = Callable[[str], Tensor]


def fused(pick: Pick, kind: str) -> Tensor:
    """All queries, all keys, all values, from rows that have each head's three together."""
    rows = pick(f"{kind}").unflatten(0, (HEADS, 3, WIDTH))
    return rows.transpose(0, 1).flatten(0, 2)


def apart(*names: str) -> Callable[[Pick], Tensor]:
    return lambda pick: torch.cat([pick(name) for name in names])


@dataclass
class Case:
    """A layer of transformers and what makes ours the same.

    Attributes:
        ours: fields of the configuration beyond the shape.
        layer: transformers' layer.
        run: its output for [B, S, H].
        weights: parameters whose names or layout differ: how each is put together.
    """

    ours: dict
    layer: nn.Module
    run: Callable[[nn.Module, Tensor], Tensor]
    weights: dict[str, Callable[[Pick], Tensor]] = field(default_factory=dict)


def blocked(visible: Tensor) -> Tensor:
    """transformers' mask: what is added to scores."""
    return torch.zeros(visible.shape).masked_fill(~visible, -1e30)[None, None]


CAUSAL = blocked(causal_mask(LENGTH, LENGTH, CPU))
PLACES = torch.arange(LENGTH)[None]


def with_angles(rotary: nn.Module, mask: Tensor):
    angles = rotary(torch.zeros(1, dtype=torch.float64), PLACES)

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        found = layer(x, attention_mask=mask.to(x.dtype), position_embeddings=angles)
        return found[0] if isinstance(found, tuple) else found

    return run


LLAMA_NAMES = {
    "attention.qkv.weight": apart(*(f"self_attn.{n}_proj.weight" for n in "qkv")),
    "attention.proj.weight": apart("self_attn.o_proj.weight"),
    "mlp.up.weight": apart("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": apart("mlp.down_proj.weight"),
    "attention_norm.weight": apart("input_layernorm.weight"),
}


def gemma2(layer: int) -> Case:
    config = Gemma2Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=WIDTH,
        intermediate_size=INNER, sliding_window=3, query_pre_attn_scalar=20,
        attn_logit_softcapping=0.8, num_hidden_layers=2, attn_implementation="eager",
    )  # fmt: skip
    visible = causal_mask(LENGTH, LENGTH, CPU)
    if layer == 0:
        visible = window_mask(LENGTH, LENGTH, 3, CPU)
    ours = {
        "num_query_groups": 2, "normalization": "RMSNorm", "apply_layernorm_1p": True,
        "post_norm": True, "glu_activation": "geglu", "add_bias_linear": False,
        "position_embedding_type": "rope", "query_pre_attn_scalar": 20.0,
        "attn_logit_softcapping": 0.8, "sliding_window": 3, "window_attn_skip_freq": 2,
        "norm_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    names = LLAMA_NAMES | {
        "attention_post_norm.weight": apart("post_attention_layernorm.weight"),
        "mlp_norm.weight": apart("pre_feedforward_layernorm.weight"),
        "mlp_post_norm.weight": apart("post_feedforward_layernorm.weight"),
    }
    run = with_angles(Gemma2RotaryEmbedding(config), blocked(visible))
    return Case(ours, Gemma2DecoderLayer(config, layer), run, names)


def qwen3(layer: int) -> Case:
    config = Qwen3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=WIDTH,
        intermediate_size=INNER, num_hidden_layers=2, attn_implementation="eager",
    )  # fmt: skip
    ours = {
        "num_query_groups": 2, "normalization": "RMSNorm", "swiglu": True, "qk_layernorm": True,
        "add_bias_linear": False, "position_embedding_type": "rope",
        "norm_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    names = LLAMA_NAMES | {
        "attention.q_norm.weight": apart("self_attn.q_norm.weight"),
        "attention.k_norm.weight": apart("self_attn.k_norm.weight"),
        "mlp_norm.weight": apart("post_attention_layernorm.weight"),
    }
    run = with_angles(Qwen3RotaryEmbedding(config), CAUSAL)
    return Case(ours, Qwen3DecoderLayer(config, layer), run, names)


def norms(attention: str, mlp: str | None) -> dict[str, Callable[[Pick], Tensor]]:
    pairs = {"attention_norm": attention} | ({} if mlp is None else {"mlp_norm": mlp})
    return {
        f"{ours}.{kind}": apart(f"{theirs}.{kind}")
        for ours, theirs in pairs.items()
        for kind in ("weight", "bias")
    }


def linears(pairs: dict[str, str], kinds=("weight", "bias")) -> dict:
    return {f"{a}.{kind}": apart(f"{b}.{kind}") for a, b in pairs.items() for kind in kinds}


def gpt_neox(parallel: bool) -> Case:
    config = GPTNeoXConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=INNER,
        num_hidden_layers=2, rotary_pct=0.5, use_parallel_residual=parallel,
        attn_implementation="eager",
    )  # fmt: skip
    ours = {
        "parallel_residual": parallel, "position_embedding_type": "rope", "rotary_percent": 0.5,
        "bias_gelu_fusion": False,
    }  # fmt: skip
    names = norms("input_layernorm", "post_attention_layernorm") | linears(
        {
            "attention.proj": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        }
    )
    for kind in ("weight", "bias"):
        names[f"attention.qkv.{kind}"] = lambda pick, kind=kind: fused(
            pick, f"attention.query_key_value.{kind}"
        )
    run = with_angles(GPTNeoXRotaryEmbedding(config), CAUSAL)
    return Case(ours, GPTNeoXLayer(config, 0), run, names)


def falcon() -> Case:
    """One norm for both, one key head (7B)."""
    config = FalconConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=INNER, multi_query=True,
        parallel_attn=True, bias=False, alibi=False, new_decoder_architecture=False,
        attn_implementation="eager", num_hidden_layers=2,
    )  # fmt: skip
    ours = {
        "parallel_residual": True, "shared_parallel_norm": True, "num_query_groups": 1,
        "position_embedding_type": "rope", "bias_gelu_fusion": False, "add_bias_linear": False,
    }  # fmt: skip
    names = norms("input_layernorm", None) | linears(
        {
            "attention.qkv": "self_attention.query_key_value",
            "attention.proj": "self_attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        ("weight",),
    )
    angles = with_angles(Qwen3RotaryEmbedding(Qwen3Config(head_dim=WIDTH)), CAUSAL)
    return Case(ours, FalconDecoderLayer(config, 0), lambda m, x: angles(Alibi(m, None), x), names)


class Alibi(nn.Module):
    """A layer that also takes ALiBi's biases."""

    def __init__(self, layer: nn.Module, biases: Tensor | None) -> None:
        super().__init__()
        self.layer, self.biases = layer, biases

    def forward(self, x: Tensor, **options) -> Tensor:
        return self.layer(x, alibi=self.biases, **options)


def bloom() -> Case:
    config = BloomConfig(hidden_size=HIDDEN, n_head=HEADS, n_layer=2)
    ours = {"position_embedding_type": "alibi", "ffn_hidden_size": 4 * HIDDEN}
    names = norms("input_layernorm", "post_attention_layernorm") | linears(
        {
            "attention.proj": "self_attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        }
    )
    for kind in ("weight", "bias"):
        names[f"attention.qkv.{kind}"] = lambda pick, kind=kind: fused(
            pick, f"self_attention.query_key_value.{kind}"
        )
    biases = build_alibi_tensor(torch.ones(BATCH, LENGTH), HEADS, torch.float64)
    mask = CAUSAL.double()
    return Case(
        ours,
        BloomBlock(config, 0),
        lambda layer, x: layer(x, alibi=biases, attention_mask=mask)[0],
        names,
    )


CASES = {
    "gemma2-window": lambda: gemma2(0),
    "gemma2-global": lambda: gemma2(1),
    "qwen3": lambda: qwen3(0),
    "gpt-neox": lambda: gpt_neox(True),
    "gpt-neox-sequential": lambda: gpt_neox(False),
    "falcon": falcon,
    "bloom": bloom,
}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_against_transformers(name, backend):
    """To float32: transformers computes softmax, angles and some norms in it."""
    torch.manual_seed(0)
    case = CASES[name]()
    shape = {
        "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": INNER,
        "num_attention_heads": HEADS, "num_query_groups": HEADS, "kv_channels": WIDTH,
        "max_position_embeddings": LENGTH, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "attention_backend": backend,
    }  # fmt: skip
    number = 1 if name.endswith("global") else 0
    block = Block(model_config(**shape | case.ours), number, TensorParallel(), False).double()
    layer = case.layer.double().eval()
    theirs = dict(layer.named_parameters())
    with torch.no_grad():
        for param in theirs.values():
            param.normal_(0.0, 0.3)
        for key, param in block.named_parameters():
            param.copy_(case.weights[key](theirs.__getitem__))
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64)
    ours_x, theirs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = case.run(layer, theirs_x)
    found = block(LayerState(ours_x, masks=AttentionMasks())).hidden
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    draw = torch.randn_like(found)
    (found * draw).sum().backward()
    (expected * draw).sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, rtol=1e-4, atol=1e-4)
    used = set()

    def gradient(key: str) -> Tensor:
        used.add(key)
        return theirs[key].grad

    for key, param in block.named_parameters():
        torch.testing.assert_close(param.grad, case.weights[key](gradient), rtol=1e-4, atol=1e-4)
    assert used == set(theirs)
