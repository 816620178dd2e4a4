"""Small GPTs of many kinds, for tests of the effect of devices and dtypes on them."""

import torch
from configs import model_config

from megatron.config import ModelConfig, ParallelConfig
from megatron.families import build_model
from megatron.model.layer_list import LayerStack
from megatron.parallel.layers import LinearKernel, ParallelLinear

BATCH, LENGTH, VOCAB, PADDED = 2, 32, 120, 128
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "num_query_groups": 2,
}  # fmt: skip
BIASED = {"add_bias_linear": True}
SCALED = {
    "llama3": '"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0',
    "yarn": '"factor": 4.0',
    "longrope": f'"short_factor": {[1.0] * 8}, "long_factor": {[2.0] * 8}',
}
KINDS: dict[str, dict] = {
    "gpt2": {},
    "llama": LLAMA,
    "window": LLAMA | {"sliding_window": 8},
    "gemma2": LLAMA
    | {"qk_layernorm": True, "post_norm": True, "apply_layernorm_1p": True, "sliding_window": 8}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "scale_embeddings": True}
    | {"query_pre_attn_scalar": 16.0, "window_attn_skip_freq": 2},
    "bloom": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "gpt-oss": LLAMA | {"sliding_window": 8, "window_attn_skip_freq": 2, "add_attention_bias": True}
    | {"softmax_type": "learnable", "swiglu": False, "quick_geglu": True}
    | {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
    "neox": LLAMA | BIASED | {"rotary_percent": 0.5, "parallel_residual": True},
} | {
    name: LLAMA | {"rope_scaling": f'{{"rope_type": "{name}", {numbers}, '
                   '"original_max_position_embeddings": 16}'}
    for name, numbers in SCALED.items()
}  # fmt: skip


def small_config(**changes: object) -> ModelConfig:
    """Two blocks of width 64; ``changes`` are fields of ModelConfig."""
    shape = {
        "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4,
        "num_query_groups": 4, "kv_channels": 16, "seq_length": LENGTH,
        "max_position_embeddings": LENGTH, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "padded_vocab_size": PADDED, "unpadded_vocab_size": VOCAB,
    }  # fmt: skip
    return model_config(**shape | changes)


def small_gpt(
    device: torch.device,
    dtype: torch.dtype,
    *,
    float8: LinearKernel | None = None,
    recompute: str | None = None,
    **changes: object,
) -> LayerStack:
    """A model of :func:`small_config`, not initialised.

    Args:
        device: where it is.
        dtype: of its parameters.
        float8: how its blocks multiply in 8 bits.
        recompute: as ``--recompute-granularity``.
        changes: fields of ModelConfig.
    """
    method = "uniform" if recompute == "full" else None
    parallel = ParallelConfig(recompute_granularity=recompute, recompute_method=method)
    with device:
        stack = build_model(small_config(**changes), parallel).to(dtype)
    for block in stack.blocks():
        for module in block.modules():
            if float8 is not None and isinstance(module, ParallelLinear):
                module.kernel = float8
    return stack
