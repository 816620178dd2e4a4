"""The comparison of every converter: it accepts a right reading of models as large as they come,
and refuses each of many wrong ones."""

import dataclasses
import json
import shutil

import pytest
import torch
from hf_cases import CASES
from hf_encoder_cases import ENCODER_CASES
from hf_modern_cases import MODERN
from samples import sampled
from test_against_hf import EXPERT_CASES, ours_of
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.checkpoint.files import CheckpointError
from megatron.families import build_model
from megatron.formats.huggingface import architectures
from megatron.formats.huggingface.compare import reference_of
from megatron.formats.huggingface.source import HuggingFaceFolder

MODELS = {
    "gpt2": "gelu", "llama": "llama3", "mistral": "window", "qwen2": "pattern",
    "qwen3": "kv_heads=2,untied", "phi3": "partial", "gemma2": "caps", "gemma3_text": "scaled",
    "gpt_neox": "rotated_whole", "opt": "tied", "falcon": "40b", "bloom": "six_heads",
    "bert": "pretraining", "megatron-bert": "masked_lm", "t5": "1.1",
}  # fmt: skip
"""A case of :data:`CASES` of each architecture."""


def changed(model, **parts):
    """A configuration in which fields of its parts differ: ``attention={"sliding_window": 8}``."""
    parts = {
        part: dataclasses.replace(getattr(model, part), **fields) for part, fields in parts.items()
    }
    return dataclasses.replace(model, **parts)


def scaled(model, **factors):
    scaling = model.positions.rope_scaling
    values = {name: getattr(scaling, name) * factor for name, factor in factors.items()}
    return changed(model, positions={"rope_scaling": dataclasses.replace(scaling, **values)})


# Wrong readings of config.json: by a condition, a configuration of which most is right.
SETTINGS = {
    "epsilon": (
        lambda m: True,
        lambda m: changed(m, norm={"norm_epsilon": 1e-6 if m.norm.norm_epsilon == 1e-5 else 1e-5}),
    ),
    "theta": (
        lambda m: m.positions.position_embedding_type == "rope",
        lambda m: changed(m, positions={"rotary_base": m.positions.rotary_base * 1.01}),
    ),
    "local theta": (
        lambda m: m.positions.rotary_base_local is not None,
        lambda m: changed(m, positions={"rotary_base_local": 101.0}),
    ),
    "share of a head": (
        lambda m: m.positions.rotary_percent == 0.75,
        lambda m: changed(m, positions={"rotary_percent": 0.5}),
    ),
    "factor": (
        lambda m: m.positions.rope_scaling.factor is not None,
        lambda m: scaled(m, factor=1.01),
    ),
    "activation": (
        lambda m: True,
        lambda m: changed(m, mlp={"activation": {
            "gelu_tanh": "gelu_erf", "gelu_erf": "gelu_tanh", "relu": "gelu_tanh",
            "swiglu": "geglu", "geglu": "swiglu"}[m.mlp.activation]}),
    ),
    "scale of scores": (
        lambda m: True,
        lambda m: changed(m, attention={
            "query_pre_attn_scalar": m.attention.query_pre_attn_scalar * 1.01}),
    ),
    "scale of embeddings": (
        lambda m: m.embedding.scale_embeddings,
        lambda m: changed(m, embedding={"scale_embeddings": False}),
    ),
    "window": (
        lambda m: m.attention.sliding_window is not None,
        lambda m: changed(m, attention={"sliding_window": m.attention.sliding_window + 1}),
    ),
    "softcap of scores": (
        lambda m: m.attention.attn_logit_softcapping is not None,
        lambda m: changed(m, attention={"attn_logit_softcapping": None}),
    ),
    "softcap of logits": (
        lambda m: m.embedding.final_logit_softcapping is not None,
        lambda m: changed(m, embedding={"final_logit_softcapping": 1.51}),
    ),
    "positions": (
        lambda m: m.positions.longest is not None,
        lambda m: changed(m, positions={
            "max_position_embeddings": m.positions.max_position_embeddings - 1}),
    ),
    "parallel": (
        lambda m: m.family == "gpt" and m.parallel_residual,
        lambda m: dataclasses.replace(m, parallel_residual=False),
    ),
    "weight of norms less one": (
        lambda m: m.norm.apply_layernorm_1p,
        lambda m: changed(m, norm={"apply_layernorm_1p": False}),
    ),
    "buckets": (
        lambda m: m.positions.position_embedding_type == "relative",
        lambda m: changed(m, positions={"relative_attention_max_distance": 21}),
    ),
}  # fmt: skip


def swap_heads(params, width):
    rows = params["layers.1.attention.qkv.weight"]
    rows[: 2 * width] = rows[: 2 * width].roll(width, 0)


def first(params, *endings):
    return next(params[key] for key in sorted(params) if key.endswith(endings))


# Wrong readings of tensors.
TENSORS = {
    "pair of heads": (
        lambda params: "layers.1.attention.qkv.weight" in params,
        lambda params, width: swap_heads(params, width),
    ),
    "one bias": (
        lambda params: any(name.endswith("mlp.down.bias") for name in params),
        lambda params, width: first(params, "mlp.down.bias").view(-1)[3:4].add_(1e-5),
    ),
    "one weight": (
        lambda params: True,
        lambda params, width: first(params, "mlp.up.weight").view(-1)[3:4].add_(1e-4),
    ),
    "one norm": (
        lambda params: True,
        lambda params, width: first(params, "mlp_norm.weight").view(-1)[3:4].mul_(1 + 1e-4),
    ),
}

FEW = {
    ("gpt2", "activation"), ("llama", "theta"), ("mistral", "window"), ("qwen2", "one bias"),
    ("qwen3", "epsilon"), ("phi3", "share of a head"), ("gemma2", "scale of embeddings"),
    ("gemma3_text", "local theta"), ("gpt_neox", "parallel"), ("opt", "positions"),
    ("falcon", "pair of heads"), ("bloom", "scale of scores"), ("bert", "one weight"),
    ("megatron-bert", "one norm"), ("t5", "buckets"),
}  # fmt: skip
MISTAKES = [(model_type, name) for model_type in MODELS for name in (*SETTINGS, *TENSORS)]


def test_every_converter_has_mistakes():
    """Models with experts have theirs in the tests of their files, relatives of BERT those of BERT,
    and what other decoders compute is compared to 1e-10 in :mod:`test_classic`, :mod:`test_modern`.
    """
    known = {form.model_type for form in architectures()}
    known -= EXPERT_CASES.keys() | ENCODER_CASES.keys() | MODERN.keys()
    assert known == set(MODELS) == {m for m, _ in FEW}


@pytest.fixture(scope="module")
def right(hf_model, tmp_path_factory):
    """By architecture, made once: what was read from a folder, with weights as small as
    transformers initialises them, and what transformers computes with it."""
    made = {}

    def make(model_type):
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            settings = CASES[model_type][MODELS[model_type]]
            hf_model(model_type, scale=0.03, **settings).save_pretrained(folder)
            source = HuggingFaceFolder(folder)
            made[model_type] = source, reference_of(folder, source.model)
            assert made[model_type][1].compared_with(ours_of(source)).agree
        return made[model_type]

    return make


def built(model, weights):
    """A model of ours with the parameters of another."""
    ours = build_model(model).eval()
    with torch.no_grad():
        for name, param in ours.canonical_parameters():
            param.copy_(weights[name][: len(param)])
    return ours


@pytest.mark.parametrize(("model_type", "mistake"), sampled(MISTAKES, lambda case: case in FEW))
def test_a_wrong_reading_is_refused(model_type, mistake, right):
    source, reference = right(model_type)
    if mistake in SETTINGS:
        applies, change = SETTINGS[mistake]
        if not applies(source.model):
            return
        wrong = change(source.model)
        try:
            again = reference_of(source.folder, wrong)
        except CheckpointError as error:
            assert "transformers reads" in str(error)
            return
        assert again.logits.keys() == reference.logits.keys()
        ours = built(wrong, dict(ours_of(source).canonical_parameters()))
    else:
        applies, change = TENSORS[mistake]
        ours = ours_of(source)
        params = dict(ours.canonical_parameters())
        if not applies(params):
            return
        with torch.no_grad():
            change(params, source.model.attention.kv_channels)
    result = reference.compared_with(ours)
    assert not result.agree, result


LARGE = {
    "positions": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 8192,
                 "short_factor": [1.0 + n / 7 for n in range(6)],
                 "long_factor": [1.0 + n for n in range(6)]},
}  # fmt: skip


@pytest.mark.parametrize("kind", sampled(list(LARGE), lambda kind: kind in ("positions", "yarn")))
def test_rounding_of_angles_is_no_difference(kind, tmp_path):
    """At the last of 131,072 positions, with logits of a trained model's size; heads of a width
    that is no power of two. In float32 angles there are off by 0.004."""
    rope = {"rope_theta": 10000.0, **({"rope_type": "default"} | LARGE[kind])}
    config = LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=131072,
        rope_parameters=rope, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(3)
    theirs = LlamaForCausalLM(config)
    with torch.no_grad():
        theirs.model.norm.weight.mul_(20)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    result = reference_of(tmp_path, source.model).compared_with(ours_of(source))
    assert result.agree and result.largest < 1e-11 * result.magnitude, result
    theta = source.model.positions.rotary_base * (1 + 1e-4)
    wrong = changed(source.model, positions={"rotary_base": theta})
    ours = built(wrong, dict(ours_of(source).canonical_parameters()))
    assert not reference_of(tmp_path, source.model).compared_with(ours).agree


@pytest.mark.parametrize(
    ("model_type", "case", "key", "part"),
    [
        ("mistral", "window", "sliding_window", {"attention": {"sliding_window": 3000}}),
        ("qwen2", "pattern", "sliding_window", {"attention": {"window_attn_skip_freq": None}}),
        ("gemma2", "window", "sliding_window", {"attention": {"sliding_window": 4095}}),
    ],
)
def test_windows_that_no_comparison_reaches(model_type, case, key, part, hf_folder):
    """They are longer than what is compared."""
    settings = CASES[model_type][case] | {"sliding_window": 4096, "max_position_embeddings": 8192}
    folder = hf_folder(model_type, **settings)
    source = HuggingFaceFolder(folder)
    assert reference_of(folder, source.model).compared_with(ours_of(source)).agree
    with pytest.raises(CheckpointError, match=f"config.json: transformers reads {key}.* 4096"):
        reference_of(folder, changed(source.model, **part))


def test_factors_that_no_comparison_reaches(hf_folder):
    folder = hf_folder("phi3", **CASES["phi3"]["longrope"])
    model = HuggingFaceFolder(folder).model
    scaling = dataclasses.replace(
        model.positions.rope_scaling, long_factor=model.positions.rope_scaling.short_factor
    )
    with pytest.raises(CheckpointError, match="transformers reads long_factor"):
        reference_of(folder, changed(model, positions={"rope_scaling": scaling}))


def test_another_vocabulary(hf_folder):
    folder = hf_folder("llama", **CASES["llama"]["kv_heads=2,untied"])
    model = HuggingFaceFolder(folder).model.with_vocabulary(60)
    with pytest.raises(CheckpointError, match="transformers reads vocab_size 61, .* has 60"):
        reference_of(folder, model)


WITHOUT_EFFECT = {
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}},
    "_flash_attn_2_enabled": True, "_attn_implementation_autoset": True,
    "_attn_implementation_internal": "sdpa", "use_flash_attention_2": True,
    "unsloth_version": "2024.9", "pretraining_tp": 2, "loss_type": "ForCausalLM",
    "keys_to_ignore_at_inference": ["past_key_values"], "_commit_hash": "0123abcd",
    "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}, "quantization_config": None,
    "model_max_length": 7, "padding_side": "right", "add_bos_token": True, "max_new_tokens": 3,
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["mistral", "gpt_neox"])
def test_keys_without_effect(model_type, right, tmp_path):
    """transformers computes the same with them."""
    source, reference = right(model_type)
    shutil.copytree(source.folder, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | WITHOUT_EFFECT))
    again = HuggingFaceFolder(tmp_path / "model")
    assert again.model == source.model
    logits = reference_of(again.folder, again.model).logits
    assert torch.equal(logits["logits"], reference.logits["logits"])
