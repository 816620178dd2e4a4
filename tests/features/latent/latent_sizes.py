"""Sizes of small latent attention."""

import json

HIDDEN, HEADS, PLAIN, ROTATED, VALUE, LATENT, RANK, LENGTH = 20, 3, 6, 4, 8, 10, 14, 24
SIZES = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "kv_channels": None, "num_layers": 1,
    "seq_length": LENGTH, "multi_latent_attention": True, "kv_lora_rank": LATENT,
    "qk_head_dim": PLAIN, "qk_pos_emb_head_dim": ROTATED, "v_head_dim": VALUE,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "qk_layernorm": True,
    "latent_norm_epsilon": 1e-6, "add_bias_linear": False, "attention_dropout": 0.0,
    "q_lora_rank": RANK,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 8, "mscale": 0.8,
    "mscale_all_dim": 0.7,
}  # fmt: skip
SHAPES = {
    "ranked": {},
    "direct": {"q_lora_rank": None},
    "yarn": {"rope_scaling": json.dumps(YARN)},
    "wider": {"v_head_dim": 13, "attention_backend": "eager"},
    "biased": {"add_attention_bias": True},
}
