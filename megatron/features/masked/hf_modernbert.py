"""ModernBERT in Hugging Face's form: an encoder with rotary positions, of which every N-th block,
from the first on, attends to the whole text and the others to a window with another rotary base;
pre-norm, a gated MLP, and embeddings that are normalised instead of the input of the first block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config import ModelConfig
from megatron.config.patterns import every_first, shortest
from megatron.features.masked.hf_bert import MASKED_LM, copies_of, lm_head, predicts
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import (
    ACTIVATION_NAMES,
    FULL,
    GATES,
    SLIDING,
    HFConfigReader,
    agreed,
    layer_types,
    read_biases,
    read_scaling,
    read_windows,
    write_biases,
    write_rope,
)
from megatron.formats.huggingface.entries import (
    attention_biased,
    block,
    linear,
    norm,
    qkv_biased,
    weight,
)
from megatron.formats.huggingface.layer_norm_decoders import SIZES
from megatron.formats.huggingface.llama import (
    DIVISIBLE,
    LOCAL_UNSCALED,
    by_kind,
    local_base,
    read_kinds,
)

_EVERY, _WINDOW, _LOCAL_BASE = 3, 128, 10_000.0
"""Defaults of the configuration class: blocks up to the next one without a window, the window, and
the rotary base of blocks with one."""
_HEAD: dict[str, dict[str, Any]] = {
    "gelu": {},
    "gelu_new": {"lm_head_activation": "gelu_tanh"},
    "gelu_pytorch_tanh": {"lm_head_activation": "gelu_tanh"},
    "relu": {"lm_head_activation": "relu"},
    "relu2": {"lm_head_activation": "squared_relu"},
}
"""Flags by classifier_activation, which the masked-LM head has too."""


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    for name in given.names("architectures") or []:
        if not name.endswith("ForMaskedLM"):
            given.refuse("architectures", name, "such a class is read for MaskedLM")
    biases = read_biases(given)
    biased = biases["add_mlp_bias"] or biases["add_bias_linear"]
    given.only("classifier_bias", (biased,), f"mlp_bias is {biased}, and the head is alike")
    given.only("decoder_bias", (True,), "the logits have a bias")
    same = fields["hidden_dropout"]
    given.only("mlp_dropout", (same,), f"embedding_dropout is {same}; there is one dropout")
    given.only("position_embedding_type", ("absolute", "rope"), "positions are rotary")
    given.only("rope_scaling", (None,), "its scaling is in rope_parameters, by kind of block")
    given.unused(
        "initializer_cutoff_factor", "classifier_pooling", "classifier_dropout",
        "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index",
        "reference_compile", "repad_logits_with_grad", "layer_norm_eps", "cls_token_id",
        "sep_token_id",
    )  # fmt: skip
    bias_key, window_key = "norm_bias", "local_attention"
    every = given.content.get("global_attn_every_n_layers", _EVERY)
    given.unused("global_attn_every_n_layers")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        given.refuse("global_attn_every_n_layers", every, "expected a positive integer")
    kinds = [SLIDING if n % every else FULL for n in range(fields["num_layers"])]
    windows = read_windows(given, given.whole(window_key), kinds)
    wide, narrow = read_kinds(given)
    if "local_rope_theta" in given.content:
        given.number("local_rope_theta")
    local = agreed(given, ("local_rope_theta",), narrow.get("rope_theta"), _LOCAL_BASE)
    return {
        **biases,
        **given.choice("classifier_activation", _HEAD),
        **windows,
        "rotary_base": agreed(given, ("global_rope_theta",), wide.get("rope_theta"), 160_000.0),
        "rotary_base_local": None if windows["sliding_window"] is None else local,
        "rope_scaling": read_scaling(given, fields, wide),
        "normalization": "LayerNorm" if given.flag(bias_key) else "UnbiasedLayerNorm",
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    rope, kinds = write_rope(model, "global_rope_theta"), layer_types(model)
    local = _LOCAL_BASE if model.attention.sliding_window is None else local_base(model)
    rope.pop("rope_scaling", None)  # transformers 5 would apply it to both kinds of blocks
    every = shortest(tuple(kind == FULL for kind in kinds), every_first)
    return {
        **write_biases(model),
        "classifier_bias": model.mlp.bias,
        "decoder_bias": True,
        "classifier_activation": ACTIVATION_NAMES[model.head_activation],
        "norm_bias": model.norm.traits.biased,
        "mlp_dropout": model.hidden_dropout,
        "local_attention": model.attention.sliding_window or _WINDOW,
        "layer_types": kinds,
        **rope,
        "local_rope_theta": local,
        "rope_parameters": by_kind(rope["rope_parameters"], local),
        # What transformers 4 reads instead of layer_types; it has no other patterns.
        **({} if isinstance(every, str) else {"global_attn_every_n_layers": every}),
        **dict.fromkeys(f"{token}_token_id" for token in ("bos", "eos", "cls", "sep")),
    }


MODERNBERT = Architecture(
    title="ModernBERT",
    model_type="modernbert",
    model_class="ModernBertForMaskedLM",
    entries=(
        *weight("embedding.word_embeddings", "model.embeddings.tok_embeddings"),
        *norm("embedding.norm", "model.embeddings.norm"),
        *block(
            "model.layers.{n}",
            [replace(each, at=lambda model, n: n) for each in norm("attention_norm", "attn_norm")],
            linear("attention.qkv", "attn.Wqkv", bias=qkv_biased),
            linear("attention.proj", "attn.Wo", bias=attention_biased),
            norm("mlp_norm", "mlp_norm"),
            linear("mlp.up", "mlp.Wi"),
            linear("mlp.down", "mlp.Wo"),
        ),
        *norm("final_norm.norm", "model.final_norm"),
        *(
            replace(each, when=lambda m: predicts(m) and m.mlp.bias)
            if each.ours == "lm_head.dense.bias" else each
            for each in lm_head("head.dense", "head.norm", "decoder")
        ),
    ),
    keys={
        **SIZES,
        "intermediate_size": "ffn_hidden_size",
        "hidden_activation": "activation",
        "attention_dropout": "attention_dropout",
        "embedding_dropout": "hidden_dropout",
        "norm_eps": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed={
        "position_embedding_type": "rope", "embed_layernorm": True, "first_norm": False,
        "bert_binary_head": False,
    },
    gated=True,
    activations=GATES,
    features=frozenset(
        {"lm_head_activation", "sliding_window", "window_attn_skip_freq", "rotary_base_local",
         "rope_scaling", "add_attention_bias", "add_mlp_bias"}
    ),
    requirements=(
        DIVISIBLE,
        LOCAL_UNSCALED,
        Requirement(lambda m: not m.token_types, "--num-tokentypes 0"),
        Requirement(
            lambda m: m.norm.normalization in ("LayerNorm", "UnbiasedLayerNorm"),
            "--normalization LayerNorm or UnbiasedLayerNorm",
        ),
    ),
    read=_read,
    write=_write,
    copies=copies_of("decoder"),
    family="bert",
    task=MASKED_LM,
)  # fmt: skip
