"""Small models of transformers, their GGUF files as llama.cpp's converter arranges the tensors, and
a writer of headers for damaged files."""

import struct

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip
GEMMA = SIZES | {
    "head_dim": 256, "sliding_window": 8, "query_pre_attn_scalar": 256, "num_hidden_layers": 3,
    "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
FALCON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 40}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
EXPERTS = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_WIDE = SIZES | {"head_dim": 12}
_FACTORS = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.21}  # fmt: skip
_WINDOW = SIZES | {"num_hidden_layers": 5, "sliding_window": 7}
_ONE_KEY = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.5,
        "original_max_position_embeddings": 16}  # fmt: skip
_CORRECTED = _WIDE | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
DECODERS = {
    "olmo": ("olmo", SIZES | {"clip_qkv": 0.6}),
    "olmo2": ("olmo2", SIZES),
    "olmo2,yarn": ("olmo2", SIZES | {"rope_parameters": YARN}),
    "olmo3": ("olmo3", _WINDOW),
    "olmoe": ("olmoe", _ONE_KEY | {"num_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("starcoder2", SIZES | {"sliding_window": None}),
    "phi2": ("phi", SIZES),
    "stablelm": ("stablelm", SIZES | {"use_qkv_bias": True}),
    "stablelm,12b": ("stablelm", SIZES | {"use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": ("nemotron", SIZES | {"head_dim": 8}),
    "arcee": ("arcee", SIZES),
    "jais2": ("jais2", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "granite": ("granite", SIZES | _FACTORS),
    "granite,tied": ("granite", SIZES | _FACTORS | {"tie_word_embeddings": True}),
    "command-r": ("cohere", SIZES | {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "command-r,plus": ("cohere", SIZES | {"logit_scale": 0.3, "use_qk_norm": True,
                                          "num_hidden_layers": 64}),
    "cohere2": ("cohere2", _WINDOW | {"logit_scale": 0.3}),
    "gemma": ("gemma", SIZES | {"head_dim": 12}),
    "smollm3": ("smollm3", SIZES | {"num_hidden_layers": 4}),
    "exaone4": ("exaone4", SIZES | {"sliding_window": None,
                                    "layer_types": ["full_attention"] * 2}),
    "seed_oss": ("seed_oss", _WIDE),
    "chatglm": ("glm", SIZES | {"head_dim": 8} | {"eos_token_id": 2}),
    "glm4": ("glm4", _WIDE | {"eos_token_id": 2}),
    "ernie4_5": ("ernie4_5", _WIDE),
    "hunyuan-dense": ("hunyuan_v1_dense", _WIDE),
    "mpt": ("mpt", {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4,
                    "max_seq_len": 40}),
    "granitemoe": ("granitemoe", SIZES | _FACTORS | {"num_local_experts": 4}),
    "gpt-oss": ("gpt_oss", _WIDE | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "dots1": ("dots1", _CORRECTED | {"num_key_value_heads": 4, "norm_topk_prob": True}),
    "minimax-m2": ("minimax_m2", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2,
                                          "head_dim": 8, "rotary_dim": 4}),
    "hunyuan-moe": ("hunyuan_v1_moe", SIZES | {"num_experts": 4, "moe_topk": 2, "head_dim": 12}),
    "glm4moe": ("glm4_moe", _CORRECTED | {"attention_bias": True, "use_qk_norm": True,
                                          "num_mtp_layers": 0, "routed_scaling_factor": 2.5,
                                          "norm_topk_prob": True}),
    "internlm3": ("internlm3", SIZES),
    "granite4": ("granitemoehybrid", _ONE_KEY | _FACTORS | {
        "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2, "num_local_experts": 0,
        "shared_intermediate_size": 64, "mamba_n_heads": 1, "position_embedding_type": "rope"}),
}  # fmt: skip
"""Models whose files have the names of :mod:`megatron.formats.gguf.kinds`."""
MODELS = {
    "llama": ("llama", SIZES),
    "llama,tied,head_dim": ("llama", SIZES | {"head_dim": 12, "tie_word_embeddings": True}),
    "llama,biases": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama,llama3": ("llama", SIZES | {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", SIZES | {"sliding_window": None}),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 4}),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", SIZES | {"head_dim": 12}),
    "phi3": ("phi3", SIZES | {"pad_token_id": None}),
    "phi3,longrope": ("phi3", SIZES | {"pad_token_id": None, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.5],
        "original_max_position_embeddings": 16}}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA),
    "gpt2": ("gpt2", GPT2),
    "gptneox": ("gpt_neox", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
                | {"tie_word_embeddings": True}),
    "falcon,7b": ("falcon", FALCON | {"multi_query": True}),
    "falcon,40b": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "qwen2moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 20}),
    "qwen3moe": ("qwen3_moe", EXPERTS | {"head_dim": 12, "norm_topk_prob": True}),
    **DECODERS,
}  # fmt: skip
"""A model_type and its settings by the name of a case."""


def theirs(name, **further):
    """A model of transformers with random weights, norms and biases too."""
    model_type, settings = MODELS[name]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **(ends | settings | further))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=draw) * 0.15
            parameter.copy_(values + 1.0 if bool((parameter == 1).all()) else values)
    return model.eval()


LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
LLAMA_KEYS = {
    "context_length": 40, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
    "attention.head_count": 4, "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
    "rope.dimension_count": 8, "vocab_size": 61,
}  # fmt: skip


def llama_tensors(model):
    """The tensors of a Llama as convert_hf_to_gguf.py arranges them: rows of queries and keys by
    ``reshape(heads, 2, rows // heads // 2, ...).swapaxes(1, 2)``."""
    tensors = {}
    for name, values in model.state_dict().items():
        if name.startswith("model.layers."):
            _, _, block, *rest, kind = name.split(".")
            inner = LLAMA_NAMES[".".join(rest)]
            heads = {"attn_q": 4, "attn_k": 2}.get(inner)
            if heads:
                rows = values.shape[0] // heads
                values = values.reshape(heads, 2, rows // 2, *values.shape[1:]).transpose(1, 2)
                values = values.reshape(heads * rows, *values.shape[3:])
            tensors[f"blk.{block}.{inner}.{kind}"] = values
        else:
            known = {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
                     "lm_head": "output"}  # fmt: skip
            tensors[f"{known[name.removesuffix('.weight')]}.weight"] = values
    return {name: values.contiguous().numpy() for name, values in tensors.items()}


def write_llama(path, model, kind=None, keys=LLAMA_KEYS, change=lambda tensors: tensors, **parts):
    """Writes a Llama by the package gguf alone; matrices in a type of ggml."""
    writer = gguf.GGUFWriter(path, "llama", **parts)
    for key, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    for name, values in change(llama_tensors(model)).items():
        if kind is not None and values.ndim > 1:
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def text(value):
    """A text as GGUF files have it."""
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded
