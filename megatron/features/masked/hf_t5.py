"""T5, mT5 and UMT5 in Hugging Face format, and the task that compares their outputs. T5 1.0 has
ReLU and tied embeddings. T5 1.1 and Flan-T5 have a gated GELU and an untied head.

All have RMSNorm, no linear biases, unscaled attention scores, and relative positions. The blocks of
a stack share their position biases, except in UMT5. A tied head scales its input instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor

from megatron.checkpoint.files import read_json, write_json
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig, ParallelConfig
from megatron.families import spec_of
from megatron.features.masked.batch import T5Batch
from megatron.features.masked.flags import EncoderDecoderConfig, MaskedDataConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture, Tensors
from megatron.formats.huggingface.config_reader import ACTIVATION_NAMES, HFConfigReader
from megatron.formats.huggingface.entries import (
    GATE_AND_UP,
    SEPARATE_KV,
    SEPARATE_QKV,
    TWICE,
    Entry,
    block,
    linear,
    norm,
    untied,
    weight,
)
from megatron.formats.huggingface.tasks import Inputs, Task
from megatron.model.layer_list import LayerState
from megatron.util.files import write_whole

_SHORTEST, _BEYOND, _LONGEST = 128, 32, 1024
"""Lengths of the compared sequences in tokens: the minimum, the margin beyond the distance from
which relative positions share a bucket, and the largest excess over the minimum."""


class TextToText(Task):
    """Task of an encoder-decoder such as T5: the encoder reads a text, the decoder generates
    one."""

    generates = True
    start: ClassVar[str] = "pad"
    """First token of the decoder's input, unless the source's run configures another one."""

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Return two encoder inputs, the second of which has padding in its last third. The
        decoder's inputs are an eighth shorter."""
        beyond = model.positions.relative_attention_max_distance + _BEYOND
        length = min(max(_SHORTEST, beyond), _SHORTEST + _LONGEST)
        length = min(length, model.positions.longest or length)
        random = torch.Generator().manual_seed(seed)
        tokens_BE, tokens_BD = (
            torch.randint(model.vocabulary.size, (2, size), generator=random)
            for size in (length, length - length // 8)
        )
        mask_BE = (torch.arange(length) < torch.tensor([[length], [length - length // 3]])).long()
        mask_BD = torch.ones_like(tokens_BD)
        batch = T5Batch(tokens_BE, tokens_BD, tokens_BD, mask_BD.float(), mask_BE, mask_BD)
        begin = spec_of(model, ParallelConfig()).begin(batch)
        theirs = {
            "input_ids": tokens_BE, "attention_mask": mask_BE, "decoder_input_ids": tokens_BD
        }  # fmt: skip
        return Inputs(begin.changed(targets=None), theirs)

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        return {"logits": state.hidden[..., : model.vocabulary.size]}

    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        start = self.start
        if source.run is not None:
            start = source.run.section(MaskedDataConfig).decoder_start_token
        return {
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "decoder_start_token_id": getattr(tokenizer, f"{start}_token_id"),
            **_cache(source.model),
        }

    def end_only(self, source: Source) -> dict[str, Any]:
        # Ids of T5, which `transformers` assumes by default.
        end = 1 if source.end_of_text is None else source.end_of_text
        tokens = {"pad_token_id": 0, "eos_token_id": end, "decoder_start_token_id": 0}
        return tokens | _cache(source.model)

    def fit_tokenizer(self, folder: Path, tokenizer: Any) -> bool:
        """Make the tokenizer append the end-of-text token and prepend nothing, as in training
        samples. T5's own files already do so. Return whether the files were changed."""
        path, end = folder / "tokenizer.json", tokenizer.eos_token
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        if tokenizer("a")["input_ids"] == [*plain, tokenizer.eos_token_id] or not path.is_file():
            return False
        backend = Tokenizer.from_file(str(path))
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {end}",
            pair=f"$A {end} $B {end}",
            special_tokens=[(end, tokenizer.eos_token_id)],
        )
        write_whole(path, backend.to_str(pretty=True).encode())
        settings = read_json(folder / "tokenizer_config.json", lenient=True)
        # BertTokenizer has its own template, and T5 does not accept token types.
        settings |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        }
        write_json(folder / "tokenizer_config.json", settings)
        return True


def _cache(model: ModelConfig) -> dict[str, bool]:
    """Return the key that enables generation with a KV cache. `transformers` sizes the cache by the
    number of encoder layers, and fails if the decoder has more."""
    return {"use_cache": (model.decoder_num_layers or 0) <= model.num_layers}


TEXT_TO_TEXT = TextToText()


_TABLE = "embedding.word_embeddings.weight"
_HEAD = "lm_head.weight"
_FORMS: dict[str, dict[str, Any]] = {
    "relu": {"relu": True},
    "gelu": {"bias_gelu_fusion": False},
    "gelu_new": {},
    "gelu_pytorch_tanh": {},
    "relu2": {"squared_relu": True},
    "gated-gelu": {"glu_activation": "geglu"},
    "gated-gelu_new": {"glu_activation": "geglu"},
    "gated-gelu_pytorch_tanh": {"glu_activation": "geglu"},
    "gated-silu": {"glu_activation": "swiglu"},
    "gated-swish": {"glu_activation": "swiglu"},
    "gated-quick_gelu": {"glu_activation": "quick_geglu"},
}
"""Flags by feed_forward_proj. A gated GELU is always the tanh approximation."""

_NAMES = ACTIVATION_NAMES | {
    "geglu": "gated-gelu", "swiglu": "gated-silu", "quick_geglu": "gated-quick_gelu",
}  # fmt: skip


def _copied(model: ModelConfig) -> bool:
    """Return whether a tied head is written as a separate tensor. If it were written as tied,
    transformers 4 would scale its input, which this model does not."""
    return model.embedding.tied and not model.embedding.scale_head_input


def _per_block(model: ModelConfig) -> bool:
    return model.part(EncoderDecoderConfig).relative_attention_per_block


def _mlp(layer: int) -> tuple[Entry, ...]:
    theirs = f"layer.{layer}.DenseReluDense"
    gate_and_up = (f"{theirs}.wi_0.weight", f"{theirs}.wi_1.weight")
    return (
        *norm("mlp_norm", f"layer.{layer}.layer_norm"),
        *weight("mlp.up", f"{theirs}.wi", when=lambda model: not model.mlp.gated),
        Entry("mlp.up.weight", gate_and_up, GATE_AND_UP, when=lambda model: model.mlp.gated),
        *linear("mlp.down", f"{theirs}.wo"),
    )


def _stack(name: str, *parts: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries of a stack of blocks. Files store shared parameters in the first block."""
    attention = "layer.0.SelfAttention"
    bias = f"{name}.block.0.{attention}.relative_attention_bias"
    return (
        *weight(f"{name}.relative_bias", bias, lambda model: not _per_block(model)),
        *block(
            f"{name}.block.{{n}}.{attention}",
            [Entry("weight", ("relative_attention_bias.weight",), when=_per_block)],
            stack=f"{name}.biases",
        ),
        *block(
            f"{name}.block.{{n}}",
            norm("attention_norm", "layer.0.layer_norm"),
            linear("attention.qkv", *(f"{attention}.{part}" for part in "qkv"), form=SEPARATE_QKV),
            linear("attention.proj", f"{attention}.o"),
            *parts,
            stack=f"{name}.layers",
        ),
        *norm(f"{name}.final_norm.norm", f"{name}.final_layer_norm"),
    )


_CROSS = (
    *norm("cross_attention_norm", "layer.1.layer_norm"),
    *linear("cross_attention.q", "layer.1.EncDecAttention.q"),
    *linear(
        "cross_attention.kv", "layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v",
        form=SEPARATE_KV,
    ),
    *linear("cross_attention.proj", "layer.1.EncDecAttention.o"),
)  # fmt: skip


def _copies(model: ModelConfig) -> Mapping[str, str]:
    tables = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return dict.fromkeys([*tables, _HEAD] if model.embedding.tied else tables, _TABLE)


def _seen(content: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Record whether the head is tied and whether its input is scaled. In transformers 4,
    tie_word_embeddings means both. transformers 5 always writes true for it, adds
    scale_decoder_outputs, and ties a head that is missing in the files."""
    said = content.get("tie_word_embeddings") is not False
    scaled = content.get("scale_decoder_outputs", said)
    tied = said or _HEAD not in tensors
    if said and "scale_decoder_outputs" in content and _HEAD in tensors:
        tied = torch.equal(tensors.tensor(_HEAD), tensors.tensor("shared.weight"))
    return content | {"tie_word_embeddings": tied, "scale_decoder_outputs": scaled}


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    form = given.content.get("feed_forward_proj", "relu")
    *gate, activation = form.split("-")
    activation = "gelu_new" if form == "gated-gelu" else activation
    given.only("is_gated_act", (bool(gate),), f"feed_forward_proj is {form}")
    given.only("dense_act_fn", (activation,), f"feed_forward_proj is {form}")
    given.only("is_encoder_decoder", (True,), "the model has an encoder and a decoder")
    given.unused("initializer_factor")
    # The key is absent if only config.json is read.
    key = "scale_decoder_outputs"
    return {
        "encoder_decoder": True,
        "scale_head_input": given.flag(key if key in given.content else "tie_word_embeddings"),
        "attention_dropout": fields["hidden_dropout"],
    }


STACKS: dict[str, Callable[[ModelConfig], int]] = {
    f"{stack}.{part}": count
    for part in ("layers", "biases")
    for stack, count in (
        ("encoder", lambda model: model.num_layers),
        ("decoder", lambda model: model.decoder_num_layers or 0),
    )
}
"""Number of blocks, and number of blocks with their own relative position biases, by stack name."""

T5 = Architecture(
    title="T5",
    model_type="t5",
    model_class="T5ForConditionalGeneration",
    family="t5",
    task=TEXT_TO_TEXT,
    entries=(
        *weight("embedding.word_embeddings", "shared", when=lambda model: not _copied(model)),
        Entry(_TABLE, ("shared.weight", _HEAD), TWICE, when=_copied),
        *_stack("encoder", _mlp(1)),
        *_stack("decoder", _CROSS, _mlp(2)),
        *weight("output_layer", "lm_head", when=untied),
    ),
    stacks=STACKS,
    keys={
        # The length is not limited. This is the training length, if config.json records it.
        "n_positions": "max_position_embeddings",
        ("d_model", "hidden_size"): "hidden_size",
        ("d_kv", "head_dim"): "kv_channels",
        "d_ff": "ffn_hidden_size",
        ("num_layers", "num_hidden_layers"): "num_layers",
        "num_decoder_layers": "decoder_num_layers",
        ("num_heads", "num_attention_heads"): "num_attention_heads",
        "relative_attention_num_buckets": "relative_attention_num_buckets",
        "relative_attention_max_distance": "relative_attention_max_distance",
        "dropout_rate": "hidden_dropout",
        "layer_norm_epsilon": "norm_epsilon",
        "feed_forward_proj": "activation",
    },
    defaults={"n_positions": 512},
    gated=None,
    activations=_FORMS,
    activation_names=_NAMES,
    fixed={
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "query_pre_attn_scalar": 1.0,
    },
    features=frozenset({"kv_channels", "scale_head_input"}),
    requirements=(
        Requirement(
            lambda m: m.embedding.tied or not m.embedding.scale_head_input,
            "no --scale-head-input with --untie-embeddings-and-output-weights",
        ),
    ),
    read=_read,
    write=lambda model: {
        "is_encoder_decoder": True,
        "tie_word_embeddings": model.embedding.tied and not _copied(model),
        "scale_decoder_outputs": model.embedding.scale_head_input,
        "initializer_factor": 1.0,
    },
    seen=_seen,
    copies=_copies,
    endings={_HEAD: "shared.weight"},
    # Old files of version 1.0 contain this tensor, which transformers does not read.
    ignored=lambda model: frozenset(
        {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"}
    ),
    base_prefix="",
)


def _seen_mt5(content: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Record whether the head is tied: it is missing in the files, or equal to the token embedding.
    config.json does not tell, because it marks all heads as tied or, with transformers 4, none. The
    head's input is never scaled."""
    tied = _HEAD not in tensors
    tied = tied or torch.equal(tensors.tensor(_HEAD), tensors.tensor("shared.weight"))
    return content | {"tie_word_embeddings": tied, "scale_decoder_outputs": False}


MT5 = dataclasses.replace(
    T5,
    title="mT5",
    model_type="mt5",
    model_class="MT5ForConditionalGeneration",
    features=T5.features - {"scale_head_input"},
    requirements=(),
    seen=_seen_mt5,
    write=lambda model: {"is_encoder_decoder": True, "tie_word_embeddings": False},
)


class ScaledTextToText(TextToText):
    """Task of UMT5, for which transformers 5 always scales the head's input."""

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        import transformers

        outputs = super().outputs(state, model)
        if model.embedding.scale_head_input or transformers.__version__.startswith("4."):
            return outputs
        return {name: logits * model.hidden_size**-0.5 for name, logits in outputs.items()}


def _seen_umt5(content: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Record whether the head is tied and its input scaled. The input is scaled unless
    tie_word_embeddings is false, which transformers 4 writes for a head without scaling.
    transformers 5 always writes true."""
    scaled = content.get("tie_word_embeddings") is not False
    return _seen_mt5(content, tensors) | {"scale_decoder_outputs": scaled}


UMT5 = dataclasses.replace(
    MT5,
    title="UMT5",
    model_type="umt5",
    model_class="UMT5ForConditionalGeneration",
    fixed={**T5.fixed, "relative_attention_per_block": True},
    features=T5.features,
    seen=_seen_umt5,
    write=lambda model: {
        "is_encoder_decoder": True,
        "tie_word_embeddings": model.embedding.scale_head_input,
    },
    task=ScaledTextToText(),
)
"""mT5 with separate relative position biases in each block."""
