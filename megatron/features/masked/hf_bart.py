"""BART, mBART and PLBart in Hugging Face format: an encoder and a decoder, each with its own
learned position embeddings, which start at row 2, and with LayerNorm and biases everywhere.

BART and PLBart are post-norm. As for BERT, the first norm of a stack in this project is the
embedding norm in Hugging Face, and the final norm is the last norm of the last block. mBART is
pre-norm, and also normalises embeddings and outputs.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.features.masked.hf_bert import sum_norm
from megatron.features.masked.hf_t5 import STACKS, TextToText
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture, Tensors
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import (
    AS_ROW,
    SEPARATE_KV,
    SEPARATE_QKV,
    TABLE,
    Entry,
    block,
    head_bias,
    linear,
    norm,
    weight,
)

_BIAS = "final_logits_bias"


class Denoising(TextToText):
    """Task of a BART-like encoder-decoder, whose decoder starts from the end-of-text token."""

    start = "eos"

    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        tokens = super().special_tokens(tokenizer, source)
        return tokens | {"forced_eos_token_id": tokens["eos_token_id"]}

    def end_only(self, source: Source) -> dict[str, Any]:
        # Ids of BART, which `transformers` assumes by default.
        end = 2 if source.end_of_text is None else source.end_of_text
        ends = ("eos_token_id", "decoder_start_token_id", "forced_eos_token_id")
        return {"pad_token_id": 1, **dict.fromkeys(ends, end)}

    def fit_tokenizer(self, folder: Path, tokenizer: Any) -> bool:
        """Leave the tokenizer unchanged, because BART's adds special tokens around a text."""
        return False


def _stack(name: str, post_norm: bool) -> tuple[Entry, ...]:
    """Return the entries for embeddings, blocks and last norm of the ``encoder`` or ``decoder``."""
    theirs, decodes = f"model.{name}", name == "decoder"
    ours = "decoder.embedding" if decodes else "embedding"
    number = "{decoder_last}" if decodes else "{last}"
    attention = tuple(f"self_attn.{part}_proj" for part in "qkv")
    names = ("self_attn_layer_norm", *["encoder_attn_layer_norm"] * decodes, "final_layer_norm")
    norms = ("attention_norm", *["cross_attention_norm"] * decodes, "mlp_norm")
    # In a post-norm stack, the norm after a sublayer becomes the norm before the next one.
    of_sums = zip(norms[1:] if post_norm else norms, names, strict=False)
    blocks = block(
        f"{theirs}.layers.{{n}}",
        *(norm(one, other) for one, other in of_sums),
        linear("attention.qkv", *attention, form=SEPARATE_QKV),
        linear("attention.proj", "self_attn.out_proj"),
        linear("mlp.up", "fc1"),
        linear("mlp.down", "fc2"),
        _CROSS if decodes else (),
        stack=f"{name}.layers",
    )
    positions = weight(f"{ours}.position_embeddings", f"{theirs}.embed_positions")
    embedded, last = f"{theirs}.layernorm_embedding", f"{name}.final_norm.norm"
    if not post_norm:
        return (
            *positions, *norm(f"{ours}.norm", embedded), *blocks,
            *norm(last, f"{theirs}.layer_norm"),
        )  # fmt: skip
    before = sum_norm("attention_norm", embedded, "layers.{before}.final_layer_norm")
    return (
        *positions,
        *block(theirs, before, stack=f"{name}.layers"),
        *blocks,
        *norm(last, f"{theirs}.layers.{number}.final_layer_norm"),
    )


_CROSS = (
    *linear("cross_attention.q", "encoder_attn.q_proj"),
    *linear(
        "cross_attention.kv", "encoder_attn.k_proj", "encoder_attn.v_proj", form=SEPARATE_KV
    ),
    *linear("cross_attention.proj", "encoder_attn.out_proj"),
)  # fmt: skip


def _copies(model: ModelConfig) -> dict[str, str]:
    tables = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    tables += [f"model.{table}" for table in tables]
    return dict.fromkeys([*tables, "lm_head.weight"], TABLE)


def _seen(content: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Record whether the logits have a bias. A bias that is missing or all zeros does not count."""
    biased = _BIAS in tensors and bool(tensors.tensor(_BIAS).any())
    return content | {"_logits_bias": biased}


def _read(given: HFConfigReader, fields: dict[str, Any], post_norm: bool) -> dict[str, Any]:
    for name in given.names("architectures") or []:
        if not name.endswith(("Model", "ForConditionalGeneration")):
            given.refuse("architectures", name, "such a class is read for texts alone")
    given.only("tie_word_embeddings", (True,), "without it transformers 5 has a table of the "
               "encoder and one of the decoder")  # fmt: skip
    for theirs, ours in (
        ("decoder_ffn_dim", "ffn_hidden_size"),
        ("decoder_attention_heads", "num_attention_heads"),
    ):
        same = fields[ours]
        given.only(theirs, (same,), f"the encoder has {same}, and blocks of both are alike")
    for side in ("encoder", "decoder"):
        given.only(f"{side}_layerdrop", (0, 0.0), "blocks are never left out")
    for key, value in (
        ("normalize_before", not post_norm), ("add_final_layer_norm", not post_norm),
        ("normalize_embedding", True), ("static_position_embeddings", False),
        ("add_bias_logits", False), ("extra_pos_embeddings", 2), ("is_encoder_decoder", True),
    ):  # fmt: skip
        given.only(key, (value,), "transformers does not read it")
    # Dropout rates of training and of other heads, and keys without effect.
    given.unused("activation_dropout", "classif_dropout", "_logits_bias", "num_hidden_layers",
                 "force_bos_token_to_be_generated", "save_step")  # fmt: skip
    return {"encoder_decoder": True, "lm_head_bias": bool(given.content.get("_logits_bias"))}


def _bart(title: str, model_type: str, model_class: str, post_norm: bool) -> Architecture:
    return Architecture(
        title=title,
        model_type=model_type,
        model_class=model_class,
        family="t5",
        task=Denoising(),
        entries=(
            *weight("embedding.word_embeddings", "model.shared"),
            *_stack("encoder", post_norm),
            *_stack("decoder", post_norm),
            *(dataclasses.replace(each, form=AS_ROW) for each in head_bias(_BIAS)),
        ),
        stacks=STACKS,
        keys={
            "max_position_embeddings": "max_position_embeddings",
            ("d_model", "hidden_size"): "hidden_size",
            "encoder_ffn_dim": "ffn_hidden_size",
            "encoder_layers": "num_layers",
            "decoder_layers": "decoder_num_layers",
            ("encoder_attention_heads", "num_attention_heads"): "num_attention_heads",
            "activation_function": "activation",
            "attention_dropout": "attention_dropout",
            "dropout": "hidden_dropout",
            "init_std": "init_method_std",
            "scale_embedding": "scale_embeddings",
        },
        fixed={
            "position_embedding_type": "learned_absolute",
            "position_embedding_offset": 2,
            "normalization": "LayerNorm",
            "norm_epsilon": 1e-5,
            "add_bias_linear": True,
            "separate_decoder_embedding": True,
            **({"apply_residual_connection_post_layernorm": True} if post_norm
               else {"embed_layernorm": True}),
        },
        features=frozenset({"lm_head_bias"}),
        requirements=(
            Requirement(
                lambda m: m.hidden_size % m.attention.num_attention_heads == 0,
                "--num-attention-heads that divide --hidden-size",
            ),
            Requirement(
                lambda m: m.embedding.tied, "no --untie-embeddings-and-output-weights"
            ),
        ),
        read=partial(_read, post_norm=post_norm),
        write=lambda model: {
            "is_encoder_decoder": True,
            "decoder_ffn_dim": model.mlp.ffn_hidden_size,
            "decoder_attention_heads": model.attention.num_attention_heads,
            "bos_token_id": None,
        },
        seen=_seen,
        copies=_copies,
        constants=lambda m: (
            {} if m.embedding.lm_head_bias else {_BIAS: torch.zeros(1, m.vocabulary.size)}
        ),
        optional=frozenset({_BIAS}),
    )  # fmt: skip


BART = _bart("BART", "bart", "BartForConditionalGeneration", post_norm=True)
MBART = _bart("mBART", "mbart", "MBartForConditionalGeneration", post_norm=False)
PLBART = _bart("PLBart", "plbart", "PLBartForConditionalGeneration", post_norm=True)
