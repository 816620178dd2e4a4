"""Names and orders of rows, against those that the tests write down themselves."""

import pytest
import torch

from megatron.formats.legacy_megatron.names import (
    BERT,
    T5,
    is_buffer,
    kv_from_megatron,
    kv_to_megatron,
    qkv_from_megatron,
    qkv_to_megatron,
    rename,
    rename_block,
    to_megatron,
)

LAYER = "language_model.encoder.layers.3"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (f"{LAYER}.input_layernorm.weight", "layers.3.attention_norm.weight"),
        (f"{LAYER}.input_norm.bias", "layers.3.attention_norm.bias"),
        (f"{LAYER}.self_attention.query_key_value.bias", "layers.3.attention.qkv.bias"),
        (f"{LAYER}.attention.query_key_value.weight", "layers.3.attention.qkv.weight"),
        (f"{LAYER}.attention.dense.weight", "layers.3.attention.proj.weight"),
        (f"{LAYER}.post_attention_layernorm.weight", "layers.3.mlp_norm.weight"),
        (f"{LAYER}.mlp.dense_h_to_4h.bias", "layers.3.mlp.up.bias"),
        (f"{LAYER}.mlp.dense_4h_to_h.weight", "layers.3.mlp.down.weight"),
        ("language_model.transformer.final_layernorm.bias", "final_norm.norm.bias"),
        ("language_model.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("language_model.embedding.tokentype_embeddings.weight",
         "embedding.tokentype_embeddings.weight"),
        ("language_model.embedding.word_embeddings.norm.bias", "embedding.norm.bias"),
        ("language_model.output_layer.weight", "output_layer.weight"),
        ("language_model.pooler.dense.bias", "pooler.dense.bias"),
        ("lm_head.layernorm.weight", "lm_head.norm.weight"),
        ("lm_head.norm.weight", "lm_head.norm.weight"),
        ("lm_head.bias", None),
        ("binary_head.weight", "binary_head.weight"),
        (f"{LAYER}.mlp.dense_h_to_4h.scale", None),
        (f"{LAYER}.cross_attention.dense.weight", None),
        ("language_model.decoder.layers.0.input_layernorm.weight", None),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "layers.0.attention.qkv.weight"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "layers.1.mlp_norm.weight"),
        ("decoder.layers.1.mlp.linear_fc1.weight3", None),
        (f"{LAYER}.mlp.experts.local_experts.0.x.weight", None),
        ("language_model.encoderlayers.0.input_layernorm.weight", None),
        ("language_model.layers.0.input_layernorm.weight", None),
        ("lm_head.evil.weight", None),
        ("weight", None),
    ],
)  # fmt: skip
def test_rename(theirs, ours):
    assert rename(theirs) == ours
    if ours is not None:
        assert rename(to_megatron(ours)) == ours


@pytest.mark.parametrize("names", [BERT, T5])
def test_the_bias_of_the_output_head(names):
    tied = "embedding.word_embeddings.bias"
    assert rename("lm_head.bias", names=names) == tied
    for ours in (tied, "output_layer.bias"):
        assert to_megatron(ours, names=names) == "lm_head.bias"


def test_a_pipeline_rank_counts_its_own_blocks():
    assert rename(f"{LAYER}.input_layernorm.weight", 8) == "layers.11.attention_norm.weight"
    assert to_megatron("layers.11.attention_norm.weight", 8) == f"{LAYER}.input_layernorm.weight"
    assert rename_block("self_attention.dense.bias") == "attention.proj.bias"
    assert to_megatron("layers.0.attention_post_norm.weight") is None
    assert to_megatron("embedding.other.weight") is None


def test_buffers_are_known():
    assert is_buffer("language_model.rotary_pos_emb.inv_freq") and is_buffer("a._extra_state")
    assert not is_buffer("language_model.embedding.word_embeddings.weight")


@pytest.mark.parametrize(
    ("version", "order"),
    [
        (0, "q00 q01 q10 q11 k00 k01 k10 k11 v00 v01 v10 v11"),
        (1, "q00 k00 v00 q01 k01 v01 q10 k10 v10 q11 k11 v11"),
        (2, "q00 q01 k00 k01 v00 v01 q10 q11 k10 k11 v10 v11"),
        (3, "q00 q01 k00 k01 v00 v01 q10 q11 k10 k11 v10 v11"),
    ],
)
@pytest.mark.parametrize("width", [None, 3])
def test_rows_by_version(version, order, width):
    """Rows of 2 heads of width 2, named by matrix, head and place."""
    ours = "q00 q01 q10 q11 k00 k01 k10 k11 v00 v01 v10 v11".split()
    shape = (12,) if width is None else (12, width)
    values = torch.randn(shape)
    theirs = values[[ours.index(row) for row in order.split()]]
    assert torch.equal(qkv_from_megatron(theirs, version, 2, 2, 2), values)
    assert torch.equal(qkv_to_megatron(values, version, 2, 2, 2), theirs)


@pytest.mark.parametrize(
    ("version", "order"),
    [
        (0, "k00 k01 k10 k11 v00 v01 v10 v11"),
        (1, "k00 v00 k01 v01 k10 v10 k11 v11"),
        (2, "k00 k01 v00 v01 k10 k11 v10 v11"),
        (3, "k00 k01 v00 v01 k10 k11 v10 v11"),
    ],
)
def test_rows_of_cross_attention(version, order):
    ours = "k00 k01 k10 k11 v00 v01 v10 v11".split()
    values = torch.randn(8, 3)
    theirs = values[[ours.index(row) for row in order.split()]]
    assert torch.equal(kv_from_megatron(theirs, version, 2, 2), values)
    assert torch.equal(kv_to_megatron(values, version, 2, 2), theirs)
    with pytest.raises(ValueError, match="key-value rows are 8; 2 heads of 3 have 12"):
        kv_from_megatron(theirs, version, 2, 3)


def test_grouped_rows():
    """4 query heads of width 1 over 2 key and value heads."""
    ours = "q0 q1 q2 q3 k0 k1 v0 v1".split()
    theirs = "q0 q1 k0 v0 q2 q3 k1 v1".split()
    values = torch.arange(8.0)
    ordered = values[[ours.index(row) for row in theirs]]
    assert torch.equal(qkv_from_megatron(ordered, 3, 4, 2, 1), values)
    assert torch.equal(qkv_to_megatron(values, 3, 4, 2, 1), ordered)


def test_what_cannot_be_ordered_is_refused():
    with pytest.raises(ValueError, match="checkpoint version 1 has no grouped queries"):
        qkv_from_megatron(torch.zeros(8), 1, 4, 2, 1)
    with pytest.raises(ValueError, match="rows are 9; 4 query heads and 2 .* of 1 have 8"):
        qkv_from_megatron(torch.zeros(9), 3, 4, 2, 1)
    with pytest.raises(ValueError, match="3 key and value heads do not divide 4"):
        qkv_to_megatron(torch.zeros(10), 3, 4, 3, 1)
