"""Files of models with latent attention: published configurations, experts that tokens go to, and
what is refused. Logits and gradients are compared in tests/formats/huggingface/test_against_hf.py,
which has the cases."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.apps.planning.parameters import model_parameters
from megatron.checkpoint.files import CheckpointError
from megatron.config import ConfigError
from megatron.families import build_model
from megatron.features.experts import layer
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.latent.flags import LatentConfig
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.model.layer_list import LayerState
from megatron.parallel.shard import shard_of

PATH = Path("config.json")
_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1536,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 128, "num_experts_per_tok": 6,
    "num_hidden_layers": 60, "num_key_value_heads": 128, "pretraining_tp": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
        "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
   
    "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 3,
    "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16",
    "transformers_version": "4.39.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
   
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_LITE = _V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1,
    "topk_method": "greedy",
}  # fmt: skip
_KIMI = _V3 | {
    "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2",
    "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
   
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    "aux_loss_alpha": 0.001, "seq_aux": True,
}  # fmt: skip
_MOONLIGHT = _V3 | {
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
    "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0, "q_lora_rank": None, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1,
    "vocab_size": 163840, "aux_loss_alpha": 0.001, "seq_aux": True,
}  # fmt: skip
_GLM = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "pad_token_id": 154820, "eos_token_id": [154820, 154827, 154829],
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240,
    "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "topk_method": "noaux_tc", "norm_topk_prob": True,
    "num_attention_heads": 20, "n_group": 1, "topk_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False,
    "dtype": "bfloat16", "transformers_version": "5.0.0rc0", "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
PUBLISHED = {
    "deepseek-ai/DeepSeek-V2-Lite": (15_706_484_224, _LITE),
    "deepseek-ai/DeepSeek-V2": (235_741_434_880, _V2),
    "deepseek-ai/DeepSeek-V3": (671_026_404_352, _V3),
    "moonshotai/Kimi-K2-Instruct": (1_026_408_209_408, _KIMI),
    "moonshotai/Moonlight-16B-A3B": (15_960_108_544, _MOONLIGHT),
    "zai-org/GLM-4.7-Flash": (29_943_390_976, _GLM),
}
"""By the name of the repository: parameters without those of multi-token prediction, and
config.json without its quantization."""
LITE = "deepseek-ai/DeepSeek-V2-Lite"
NAMES = [LITE, *(pytest.param(name, marks=pytest.mark.proof) for name in PUBLISHED if name != LITE)]


def model_of(content):
    return architecture_named(content, PATH).model(dict(content), PATH)


@pytest.mark.parametrize("name", NAMES)
def test_published_models(name):
    """Their number of parameters, and the same model from what is written again."""
    count, content = PUBLISHED[name]
    model, known = model_of(content), architecture_named(content, PATH)
    assert model_parameters(model) == count
    assert known.misfits(model) == []
    assert known.model(json.loads(json.dumps(known.config(model))), PATH) == model
    flags = model.flags()
    assert flags.resolve() == model
    assert model.rotated == content["qk_rope_head_dim"]


SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 40,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "tie_word_embeddings": False, "moe_intermediate_size": 20,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
KINDS = {
    "deepseek_v3": SMALL | {"first_k_dense_replace": 1},
    "deepseek_v2": SMALL | {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    "glm4_moe_lite": SMALL,
}


@pytest.fixture
def saved(tmp_path):
    """Saves a model of transformers with random weights; the model and its folder."""

    def save(model_type, **settings):
        config = AutoConfig.for_model(model_type, **KINDS[model_type] | settings)
        model = AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
        model.save_pretrained(tmp_path / "theirs")
        return model, tmp_path / "theirs"

    return save


@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v2", *(pytest.param(k, marks=pytest.mark.proof) for k in KINDS if "v2" not in k)],
)
def test_tokens_go_to_the_same_experts(model_type, saved, monkeypatch):
    """With the same weights, in every layer with experts."""
    theirs, folder = saved(model_type)
    source, routings, chosen = HuggingFaceFolder(folder), [], []

    def recorded(*arguments):
        routings.append(route(*arguments))
        return routings[-1]

    route = layer.route
    monkeypatch.setattr(layer, "route", recorded)
    for block in theirs.model.layers:
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][1:]))
    ours = build_model(source.model).eval()
    tokens_BS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, param in ours.canonical_parameters():
            param.copy_(shard_of(param).cut(source.tensor(name)))
        ours(LayerState(tokens_BS))
        theirs(tokens_BS)
    assert len(routings) == len(chosen) == source.model.part(ExpertsConfig).layers
    for routing, (weights_TK, experts_TK) in zip(routings, chosen, strict=True):
        found_TE, wanted_TE = (
            torch.zeros(48, 8).scatter(1, places, weights.float())
            for places, weights in (
                (routing.experts_TK, routing.weights_TK), (experts_TK, weights_TK),
            )
        )  # fmt: skip
        torch.testing.assert_close(found_TE, wanted_TE, rtol=1e-5, atol=1e-6)
        assert (found_TE > 0).any(0).sum() > 4


REFUSED = [
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2 .*every head has"),
    ("deepseek_v3", {"qk_head_dim": 64}, "qk_head_dim is 64 .*sum of its parts"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'.*sigmoids"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0 .*positive integer"),
    ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 .*whole heads"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True .*does not read it"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc' .*greedy"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True .*no biases"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 3}, "one at least that is sparse"),
    ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2 .*types alone"),
]


@pytest.mark.parametrize(("model_type", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_named(model_type, change, message):
    content = {"model_type": model_type} | KINDS[model_type] | change
    with pytest.raises(CheckpointError, match=message):
        model_of(content)


FLAGS = {
    "q_lora_rank": 12, "kv_lora_rank": 20, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 30, "latent_norm_epsilon": 1e-3, "qk_layernorm": False,
    "moe_router_group_score": "sum", "moe_router_num_groups": 2, "add_attention_bias": True,
    "query_pre_attn_scalar": 5.0, "softmax_type": "off-by-one", "sliding_window": 8,
}  # fmt: skip


@pytest.mark.parametrize("model_type", KINDS)
def test_a_flag_is_written_or_refused(model_type):
    """Never is one left out."""
    content = {"model_type": model_type} | KINDS[model_type]
    known, plain = architecture_named(content, PATH), model_of(content)
    refused = set()
    for name, value in FLAGS.items():
        try:
            flags = dataclasses.replace(plain.flags(), **{name: value}, layer_experts=())
            model = flags.resolve().with_vocabulary(61)
        except ConfigError:  # there is no such network
            continue
        if known.misfits(model):
            refused.add(name)
            continue
        written = json.loads(json.dumps(known.config(model)))
        assert getattr(known.model(written, PATH).flags(), name) == value, name
    assert {"latent_norm_epsilon", "qk_layernorm", "sliding_window"} <= refused
    assert not refused & {"q_lora_rank", "v_head_dim", "add_attention_bias"}


def test_an_architecture_without_latents_refuses_them():
    model = model_of({"model_type": "glm4_moe_lite"} | KINDS["glm4_moe_lite"])
    assert "no --multi-latent-attention" in architecture_named(
        {"model_type": "llama"}, PATH
    ).misfits(model)
    assert model.part(LatentConfig).latent_width == 24
