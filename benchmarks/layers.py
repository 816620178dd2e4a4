#!/usr/bin/env python
"""Time and kept memory of latent attention, Gated DeltaNet and Mamba-2, next to transformers.

    python benchmarks/layers.py

One layer, forward and backward, one thread, in turns; medians of CPU time. Kept are the bytes that
autograd keeps from the forward pass to the backward pass, without the weights.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BambaConfig, DeepseekV3Config, Qwen3NextConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron.config import ModelFlags
from megatron.config.features import taking_part
from megatron.model.layer_list import LayerState
from megatron.parallel.tensor_parallel import TensorParallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def ours(hidden: int, length: int, **flags: Any) -> nn.Module:
    """The layer that replaces attention in a block of a model with these flags."""
    model = ModelFlags(
        num_layers=1, hidden_size=hidden, num_attention_heads=8, seq_length=length,
        max_position_embeddings=length, position_embedding_type="rope", normalization="RMSNorm",
        norm_epsilon=1e-6, add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        **flags,
    ).resolve()  # fmt: skip
    layers = (feature.mixer(model, 0, TensorParallel(), False) for feature in taking_part())
    return next(layer for layer in layers if layer is not None)


def latent(hidden: int, length: int) -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]:
    """DeepSeek-V3's attention; ours, theirs, and a call of theirs."""
    layer = ours(
        hidden, length, multi_latent_attention=True, q_lora_rank=hidden // 2,
        kv_lora_rank=hidden // 4, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64,
        qk_layernorm=True,
    )  # fmt: skip
    config = DeepseekV3Config(
        hidden_size=hidden, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=1,
        q_lora_rank=hidden // 2, kv_lora_rank=hidden // 4, qk_nope_head_dim=64,
        qk_rope_head_dim=32, v_head_dim=64, attn_implementation="sdpa",
    )  # fmt: skip
    theirs, rotary = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)

    def call(x: Tensor) -> Tensor:
        angles = rotary(x, torch.arange(length)[None])
        return theirs(x, position_embeddings=angles, attention_mask=None)[0]

    return layer, theirs, call


def delta(hidden: int, length: int) -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]:
    """Qwen3-Next's Gated DeltaNet."""
    sizes = dict(linear_num_key_heads=2, linear_num_value_heads=4,
                 linear_key_head_dim=128, linear_value_head_dim=128)  # fmt: skip
    layer = ours(
        hidden, length, experimental_attention_variant="gated_delta_net",
        linear_attention_freq="[1]", **sizes,
    )  # fmt: skip
    config = Qwen3NextConfig(
        hidden_size=hidden, num_hidden_layers=1, layer_types=["linear_attention"], **sizes
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    return layer, theirs, theirs


def mamba(hidden: int, length: int) -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]:
    """Bamba's Mamba-2."""
    layer = ours(
        hidden, length, experimental_attention_variant="mamba2", linear_attention_freq="[1]",
        mamba_state_dim=64, mamba_head_dim=64, mamba_num_groups=2,
    )  # fmt: skip
    config = BambaConfig(
        hidden_size=hidden, num_hidden_layers=1, mamba_d_state=64, mamba_d_head=64,
        mamba_n_heads=2 * hidden // 64, mamba_n_groups=2,
    )  # fmt: skip
    theirs = BambaMixer(config, 0)
    return layer, theirs, theirs


LAYERS = {"latent attention": latent, "Gated DeltaNet": delta, "Mamba-2": mamba}


def kept(run: Callable[[], Tensor], weights: nn.Module) -> int:
    """Bytes that the backward pass of a run needs, without weights."""
    storages: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in weights.parameters()}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    return sum(size for place, size in storages.items() if place not in own)


def main() -> int:
    options = parser().parse_args()
    torch.set_num_threads(1)
    print("| layer | dtype | CPU ms | transformers | ratio | kept MB | transformers |")
    print("|---|---|---|---|---|---|---|")
    for name, make in LAYERS.items():
        for dtype in options.dtypes:
            layer, theirs, call = make(options.hidden, options.length)
            for param in (*layer.parameters(), *theirs.parameters()):
                nn.init.normal_(param, std=0.02)
            layer, theirs = layer.to(DTYPES[dtype]), theirs.to(DTYPES[dtype])
            x = torch.randn(1, options.length, options.hidden, dtype=DTYPES[dtype])
            x.requires_grad_()
            ours_of = partial(layer, x, LayerState(x))
            runs = (ours_of, layer), (partial(call, x), theirs)
            times: list[list[float]] = [[], []]
            for _ in range(options.rounds):
                for (run, _weights), each in zip(runs, times, strict=True):
                    start = time.process_time()
                    run().sum().backward()
                    each.append(time.process_time() - start)
            ms = [1e3 * statistics.median(each[1:]) for each in times]
            mb = [kept(run, weights) / 1e6 for run, weights in runs]
            print(f"| {name} | {dtype} | {ms[0]:.0f} | {ms[1]:.0f} | {ms[0] / ms[1]:.2f} "
                  f"| {mb[0]:.1f} | {mb[1]:.1f} |", flush=True)  # fmt: skip
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--hidden", type=int, default=512)
    result.add_argument("--length", type=int, default=1024)
    result.add_argument("--rounds", type=int, default=6)
    result.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    return result


if __name__ == "__main__":
    sys.exit(main())
